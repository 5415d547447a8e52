"""What other clients see while one attacks: floods, huge prompts, silent connections, endless templates.

    python benchmarks/hostile_clients.py [--ranks 2] [--seconds 10] [--json FILE]

Serves the bundled model with a chat template of its own, whose branches are the bombs; a request chooses one by
`chat_template_kwargs`. Beside every attack an ordinary client asks for four tokens, five times a second, and looks at
/health. The attacker is a process of its own, and the ordinary client another. Printed are the attack's answers, its
time, the ordinary client's latencies, and the largest resident memory of the HTTP process and of its text workers.
All traffic goes to 127.0.0.1, and every attack is bounded in count and time.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import multiprocessing
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor, ProcessPoolExecutor

import httpx
import psutil

from ckdist.engine.load_model import BUNDLED

KEY = "the-key-of-the-ordinary-client"
START_SECONDS, STOP_SECONDS = 120.0, 40.0
ASK_SECONDS = 0.2
ATTACK_SECONDS = 30.0
MEBIBYTE = 1 << 20

# Each is one branch of the template, chosen by `bomb`. Sizes hold the variable `k`, which is 1: constants would be
# computed when the template is compiled, and end every chat with it.
DOUBLED = "{% set ns = namespace(l=[1]) %}{% for _ in range(60*k) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}"
OTHER = DOUBLED.replace("ns", "n2")
BOMBS = {
    "sum": "{{ ([[1]]*(4000000*k))|sum(start=[])|length }}",
    "equal": DOUBLED + OTHER + "{{ ns.l == n2.l }}",
    "sort": DOUBLED + "{{ [ns.l, ns.l]|sort }}",
    "upper": DOUBLED + "{{ ns.l|upper }}",
    "escape": DOUBLED + "{{ ns.l|e }}",
    "raise": DOUBLED + "{{ raise_exception(ns.l) }}",
    "join": DOUBLED + "{{ ','.join(ns.l) }}{{ ns.l|join(',') }}",
    "integer": "{{ ('f'*(4000000*k))|int(0,16) // 3 }}",
    "slice": "{{ range(100000*k)|slice(k*10**9)|list|length }}",
    "map": "{{ (['a'*(4000000*k)]*(10000*k))|map('upper')|list|length }}",
    "tojson": "{{ [1,2,3]|tojson(indent='x'*(4000000*k)) }}",
    "memory": (
        "{% set ns = namespace(l=[]) %}{% for _ in range(1000000*k) %}{% set ns.l = ns.l + ['a'*(4000000*k)] %}{% "
        "endfor %}"
    ),
    "batch": "{{ [1]|batch(30000000*k, 'x')|list|length }}",
    "truncate": "{{ 'abcdef'|truncate(1) }}",
    "loop": "{% for a in range(100000*k) %}{% for b in range(100000*k) %}{% endfor %}{% endfor %}",
}
TEMPLATE = (
    "{% if bomb is not defined %}{% for m in messages %}{{ m.content }}{% endfor %}"
    + "".join("{% elif bomb == '" + name + "' %}" + body for name, body in BOMBS.items())
    + "{% endif %}"
)


def model_folder(folder: pathlib.Path) -> pathlib.Path:
    """The bundled model with `TEMPLATE`."""
    for file in BUNDLED.iterdir():
        if file.name != "tokenizer_config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((BUNDLED / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


@contextlib.contextmanager
def served(folder: pathlib.Path, ranks: int):
    """A running server's port and the process of rank 0's launcher."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = ["mpirun", "-n", str(ranks)] if ranks > 1 else []
    command += [sys.executable, "-m", "ckdist.cli.main", "serve", "-m", str(folder)]
    command += ["--port", str(port), "--api-key", KEY]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            if time.monotonic() > end or process.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.1)
        yield port, psutil.Process(process.pid)
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        psutil.wait_procs([*family, process], STOP_SECONDS)
        for left in (*family, process):  # a server that an attack has stopped for good
            with contextlib.suppress(psutil.Error):
                left.kill()


class Watch:
    """The ordinary client, and the memory of the HTTP process and of its children, while `during` is open."""

    def __init__(self, port: int, launcher: psutil.Process):
        self.url = f"http://127.0.0.1:{port}"
        roots = [p for p in launcher.children(recursive=True) if "ckdist.serve" in p.cmdline()]
        self.http = roots[0]

    @contextlib.asynccontextmanager
    async def during(self) -> AsyncIterator[dict]:
        seen: dict = {"chat": [], "health": [], "failed": collections.Counter(), "http": 0, "workers": 0}
        tasks = [asyncio.create_task(work(seen)) for work in (self._chat, self._health, self._memory)]
        await asyncio.sleep(1)
        try:
            yield seen
            await asyncio.sleep(1)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _chat(self, seen: dict) -> None:
        body = {"messages": [{"role": "user", "content": "def main("}], "max_tokens": 4}
        headers = {"Authorization": f"Bearer {KEY}"}
        while True:
            chat = lambda client: client.post("/v1/chat/completions", json=body, headers=headers)
            await self._ask(seen, "chat", chat)

    async def _health(self, seen: dict) -> None:
        while True:
            await self._ask(seen, "health", lambda client: client.get("/health"))

    async def _ask(self, seen: dict, kind: str, call: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]) -> None:
        begin = time.monotonic()
        try:
            async with httpx.AsyncClient(base_url=self.url, timeout=30) as client:  # a new connection each time
                answer = await call(client)
            if answer.status_code != 200:
                seen["failed"][f"{kind} {answer.status_code}"] += 1
        except httpx.HTTPError as error:
            seen["failed"][f"{kind} {type(error).__name__}"] += 1
        seen[kind].append(time.monotonic() - begin)
        await asyncio.sleep(ASK_SECONDS)

    async def _memory(self, seen: dict) -> None:
        while True:
            with contextlib.suppress(psutil.Error):
                seen["http"] = max(seen["http"], self.http.memory_info().rss)
            workers = 0
            for process in self.http.children(recursive=True):
                with contextlib.suppress(psutil.Error):  # one that has just ended
                    workers += process.memory_info().rss
            seen["workers"] = max(seen["workers"], workers)
            await asyncio.sleep(0.05)


class Attacks:
    """Each method is one attack; its result counts what the attacker was answered."""

    def __init__(self, port: int, seconds: float):
        self.port, self.seconds = port, seconds
        self.url = f"http://127.0.0.1:{port}"

    async def none(self) -> collections.Counter:
        await asyncio.sleep(self.seconds)
        return collections.Counter()

    async def silent(self, count: int) -> collections.Counter:
        """Connections that never send a byte."""
        answers: collections.Counter = collections.Counter()
        writers = []
        for _ in range(count):
            try:
                writers.append((await asyncio.wait_for(asyncio.open_connection("127.0.0.1", self.port), 5))[1])
            except (OSError, asyncio.TimeoutError) as error:
                answers[type(error).__name__] += 1
        await asyncio.sleep(self.seconds)
        for writer in writers:
            writer.close()
        answers["opened"] = len(writers)
        return answers

    async def burst(self, count: int) -> collections.Counter:
        """Requests of one token, all at once."""
        body = {"prompt": "a", "max_tokens": 1}
        return await self._posts([("/v1/completions", json.dumps(body).encode())] * count)

    async def posts(self, path: str, bodies: list[bytes]) -> collections.Counter:
        return await self._posts([(path, body) for body in bodies])

    async def bomb(self, name: str, count: int = 4) -> collections.Counter:
        """Chats whose template is the bomb `name`."""
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        body["chat_template_kwargs"] = {"bomb": name, "k": 1}
        return await self._posts([("/v1/chat/completions", json.dumps(body).encode())] * count)

    async def _posts(self, requests: list[tuple[str, bytes]]) -> collections.Counter:
        answers: collections.Counter = collections.Counter()
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=ATTACK_SECONDS, limits=limits) as client:

            async def one(path: str, body: bytes) -> None:
                try:
                    answer = await client.post(path, content=body, headers=headers)
                    kind = answer.headers.get("content-type", "").partition(";")[0]
                    answers[f"{answer.status_code}{'' if kind == 'application/json' else ' ' + kind}"] += 1
                except httpx.HTTPError as error:
                    answers[type(error).__name__] += 1

            await asyncio.gather(*(one(path, body) for path, body in requests))
        return answers


def attacks_on(port: int, seconds: float) -> dict[str, Callable[[], Awaitable[collections.Counter]]]:
    attacks = Attacks(port, seconds)
    text = "The quick brown fox jumps over the lazy dog. " * (8 * MEBIBYTE // 46)
    prompt = json.dumps({"prompt": text, "max_tokens": 1}).encode()
    pieces = json.dumps({"content": text, "with_pieces": True}).encode()
    ids = json.dumps({"prompt": [1] * 2_600_000, "max_tokens": 1}).encode()
    tokens = json.dumps({"tokens": [1] * 2_600_000}).encode()
    metadata = json.dumps({"prompt": "a", "max_tokens": 1, "metadata": [{}] * 2_000_000}).encode()
    table: dict[str, Callable[[], Awaitable[collections.Counter]]] = {
        "nothing": attacks.none,
        "660 silent connections": lambda: attacks.silent(660),
        "900 silent connections": lambda: attacks.silent(900),
        "2,000 requests at once": lambda: attacks.burst(2000),
        "6 prompts of 8 MB": lambda: attacks.posts("/v1/completions", [prompt] * 6),
        "/tokenize with_pieces, 8 MB": lambda: attacks.posts("/tokenize", [pieces]),
        "/detokenize, 2.6 M ids": lambda: attacks.posts("/detokenize", [tokens]),
        "2.6 M token ids": lambda: attacks.posts("/v1/completions", [ids]),
        "2 M objects in metadata": lambda: attacks.posts("/v1/completions", [metadata]),
    }
    table |= {f"template: {name}": lambda name=name: attacks.bomb(name) for name in BOMBS}
    return table | {"16 x template: loop": lambda: attacks.bomb("loop", 16)}


def attacked(name: str, port: int, seconds: float) -> tuple[dict[str, int], float]:
    """In the attacker's process: what the attack `name` was answered, and its seconds."""
    begin = time.monotonic()

    async def bounded() -> collections.Counter:
        return await asyncio.wait_for(attacks_on(port, seconds)[name](), ATTACK_SECONDS + seconds)

    try:
        answers = asyncio.run(bounded())
    except asyncio.TimeoutError:
        answers = collections.Counter({"no answer in time": 1})
    return dict(answers), time.monotonic() - begin


async def measure(port: int, launcher: psutil.Process, seconds: float, attacker: Executor) -> list[dict]:
    rows = []
    watch = Watch(port, launcher)
    for name in attacks_on(port, seconds):
        async with watch.during() as seen:
            answers, took = await asyncio.get_running_loop().run_in_executor(attacker, attacked, name, port, seconds)
        row = {"attack": name, "seconds": took, "answers": answers, "http": seen["http"], "workers": seen["workers"]}
        row["failed"] = dict(seen["failed"])
        for kind in ("chat", "health"):
            row |= {f"{kind} median": statistics.median(seen[kind]), f"{kind} worst": max(seen[kind])}
        rows.append(row)
        print(line(row), flush=True)
    return rows


def line(row: dict) -> str:
    answers = ", ".join(f"{count} x {what}" for what, count in row["answers"].items()) or "-"
    failed = ", ".join(f"{count} x {what}" for what, count in row["failed"].items()) or "-"
    keys = ("chat median", "chat worst", "health median", "health worst")
    times = " / ".join(f"{row[key] * 1e3:.0f}" for key in keys)
    memory = " / ".join(f"{row[key] / MEBIBYTE:.0f}" for key in ("http", "workers"))
    return f"| {row['attack']} | {row['seconds']:.1f} | {answers} | {times} | {failed} | {memory} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long idle attacks last")
    parser.add_argument("--json", type=pathlib.Path, help="write the rows there too")
    arguments = parser.parse_args()
    columns = ("attack", "s", "answers", "chat median / worst, health median / worst, ms", "client failed")
    print("| " + " | ".join(columns) + " | RSS of HTTP / workers, MiB |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = model_folder(pathlib.Path(name))
        spawned = multiprocessing.get_context("spawn")
        with (
            served(folder, arguments.ranks) as (port, launcher),
            ProcessPoolExecutor(1, spawned) as attacker,
        ):
            rows = asyncio.run(measure(port, launcher, arguments.seconds, attacker))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
