"""Templates, prompts and tokenizers that attack: each is a quick error for who sent it, and nothing else notices."""

import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from ckdist.errors import ModelFileError
from ckdist.serve.addresses import listen
from ckdist.serve.server import HttpServer
from ckdist.serve.settings import HttpSettings
from ckdist.tokens.confined import Zygote, load_vocabulary
from ckdist.tokens.process_limits import Limits
from ckdist.tokens.tried import load_tried
from tests.support.served import TEMPLATE, serving, write_tokenizer

# `k` is 1, so that nothing is computed while the template is compiled. What hung the server or took its memory before
# rendering had a process of its own. `ns.l` is a list doubled 60 times.
DOUBLED = "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}"
TEXTS = "{% set ns = namespace(l=['a' * 1000]) %}{% for i in range(40) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}"
DIGITS = "{% set n = ('f' * k * 4000000) | int(0, 16) %}"
BOMBS = {
    "sum": "{{ ([[1]] * k * 4000000) | sum(start=[]) | length }}",
    "equal": DOUBLED
    + "{% set ns.m = [1] %}{% for i in range(60) %}{% set ns.m = [ns.m, ns.m] %}{% endfor %}{{ ns.l == ns.m }}",
    "key": "{% set ns = namespace(l=(1,)) %}{% for i in range(60) %}{% set ns.l = (ns.l, ns.l) %}{% endfor %}"
    "{{ {ns.l: 1} | length }}",
    "upper": TEXTS + "{{ ns.l | upper | length }}",
    "replace": TEXTS + "{{ ns.l | replace('a', 'b' * k * 1000) | length }}",
    "raise": TEXTS + "{{ raise_exception(ns.l) }}",
    "strftime": TEXTS + "{{ strftime_now(ns.l | string) }}",
    "join": TEXTS + "{{ ns.l | join(ns.l) | length }}",
    "divide": DIGITS + "{{ n // 3 }}",
    "modulo": DIGITS + "{{ (n * n * n) % (n + 1) }}",
    "slice": "{{ range(100000) | slice(10 ** 9) | list | length }}",
    "map": "{{ (['a' * k * 4000000] * 10000) | map('upper') | list | length }}",
    "indent": "{{ [[[[1]]]] | tojson(indent='x' * k * 400000000) | length }}",
    "memory": "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set ns.l = ns.l + ['a' * k * 4000000 ~ i] %}{% endfor %}",
    "batch": "{{ [k] | batch(3000000000, 0) | list | length }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ (10 * k) ** 9999999999 }}",
    "width": "{{ '%9999999999d' % k }}",
    "center": "{{ ('a' * k).center(9999999999) }}",
    "format": "{{ '{:9999999999}'.format(k) }}",
    "truncate": "{{ ('abcdef' * k) | truncate(2) }}",
}
HOSTILE = (
    "{% set which = messages[-1].content %}{% set k = [messages | length, 1] | min %}"
    + "".join(f"{{% if which == '{name}' %}}{bomb}{{% endif %}}" for name, bomb in BOMBS.items())
    + TEMPLATE
)

SECONDS = 3.0  # in which an attack is answered: one of CPU time, on a machine that has other work
PATIENCE = 1.0  # what others wait at most


@pytest.fixture(scope="module")
def served():
    with serving({"context_length": 1 << 16}, template=HOSTILE, max_body=9 << 20, parallel=64) as pair:
        yield pair


@contextlib.contextmanager
def noticing(engine, http):
    """While the block runs, another client asks for health and chats, and a third reads a stream; their longest waits,
    in seconds.
    """
    waits, ended = {"health": 0.0, "chat": 0.0, "stream": 0.0}, threading.Event()
    engine.delay = 0.01

    def ask():
        with httpx.Client(base_url=http.url, timeout=30) as client:
            while not ended.is_set():
                for name, path, body in (
                    ("health", "/health", None),
                    ("chat", "/v1/chat/completions", chat("hello", max_tokens=1)),
                ):
                    begun = time.monotonic()
                    answer = client.post(path, json=body) if body else client.get(path)
                    assert answer.status_code == 200, answer.text
                    waits[name] = max(waits[name], time.monotonic() - begun)
                ended.wait(0.02)

    def read():
        body = {"prompt": "ab", "max_tokens": 60000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{http.url}/v1/completions", json=body, timeout=30) as stream:
            last = time.monotonic()
            for _ in stream.iter_bytes():
                waits["stream"], last = max(waits["stream"], time.monotonic() - last), time.monotonic()
                if ended.is_set():
                    return

    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(ask), pool.submit(read)]
        try:
            yield waits
        finally:
            ended.set()
            for other in others:
                other.result()
            engine.delay = 0.0


def chat(text, **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


@pytest.mark.alone
def test_a_template_that_explodes_is_a_400_in_a_second(served):
    engine, http = served

    def attack(name):
        begun = time.monotonic()
        answer = httpx.post(f"{http.url}/v1/chat/completions", json=chat(name, max_tokens=1), timeout=30)
        return name, answer, time.monotonic() - begun

    with noticing(engine, http) as waits, ThreadPoolExecutor(2) as pool:
        results = list(pool.map(attack, BOMBS))
    for name, answer, seconds in results:
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "messages" and "\n" not in error["message"], (
            name,
            answer.text,
        )
        assert seconds < SECONDS, (name, seconds)
    assert max(waits.values()) < PATIENCE, waits
    assert http.poll() is None


@pytest.mark.parametrize(
    "template", ["{{ " + "~".join(["'a'"] * 60_000) + " }}", "{{ ([[1]] * 4000000) | sum(start=[]) | length }}"]
)
def test_a_template_that_never_ends_leaves_completions_working(template):
    """The template was tried at the start, so its refusal takes no time."""
    with serving(template=template) as (_, http):
        begun = time.monotonic()
        answer = httpx.post(f"{http.url}/v1/chat/completions", json=chat("a"))
        assert answer.status_code == 400 and time.monotonic() - begun < SECONDS
        assert httpx.post(f"{http.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def leave(http, body: bytes) -> None:
    """Sends a request and closes the connection before there can be an answer."""
    with socket.create_connection(("127.0.0.1", int(http.url.rsplit(":", 1)[1])), timeout=60) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)


@pytest.mark.alone
def test_long_prompts_take_turns_and_end_with_their_clients(served):
    """Six at once, which no rule of size refuses: others wait under a second, and the HTTP process stays small."""
    engine, http = served
    process = psutil.Process(http.pid)
    body = json.dumps(
        {"prompt": "some words " * 52_000, "max_tokens": 1}
    ).encode()  # 572,000 bytes; of 9 a token it would be just short enough
    most, url = 0, f"{http.url}/v1/completions"

    with noticing(engine, http) as waits, ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(httpx.post, url, content=body, timeout=60) for _ in range(6)]
        while not all(answer.done() for answer in answers):
            most = max(most, process.memory_info().rss)
            time.sleep(0.02)
        for answer in answers:
            assert (
                answer.result().status_code == 400
                and "exceeds the available context size" in answer.result().json()["error"]["message"]
            )
        for _ in range(6):
            leave(http, body)
        begun = time.monotonic()
        assert httpx.post(url, content=body, timeout=60).status_code == 400 and time.monotonic() - begun < 10, (
            "those whose clients have gone are not worked on"
        )
    assert max(waits.values()) < PATIENCE and most < 1 << 30, (waits, most)


def test_nothing_long_runs_on_the_event_loop(tmp_path):
    """The CPU time between two turns of the loop, while clients send what takes seconds; wall time would measure the
    machine's other work.
    """
    listener, longest = listen("127.0.0.1", 0), []

    async def watch():
        while True:
            begun = time.thread_time()
            await asyncio.sleep(0.001)
            longest.append(time.thread_time() - begun)

    async def scenario():
        endpoint, url = f"ipc://{tmp_path}/engine", f"http://127.0.0.1:{listener.getsockname()[1]}"
        folder = write_tokenizer(tmp_path)
        settings = HttpSettings(
            endpoint=endpoint, model=str(folder), model_name="bytes", listener=-1, parent=os.getppid(), max_body=9 << 20
        )
        server = HttpServer(settings, listener)
        running, watching = asyncio.create_task(server.run()), asyncio.create_task(watch())
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.support.hostile_client", endpoint, url, stdout=subprocess.PIPE, limit=1 << 20
        )
        results = {}
        async for line in client.stdout:
            name, status, _seconds, size, begin = json.loads(line)
            results.setdefault(name, []).append((status, begin, size, max(longest, default=0)))
            longest.clear()
        watching.cancel()
        server.signals = 2
        await running
        return results, await client.wait()

    results, code = asyncio.run(scenario())
    assert code == 0 and results.pop("ready")
    assert {name: {status for status, *_ in answers} for name, answers in results.items()} == {
        **{name: {200} for name in results}, "token ids": {400}, "text": {400}, "three texts": {400},
    }  # fmt: skip
    for name, answers in results.items():
        if name in ("token ids", "text", "three texts"):
            assert all("exceeds the available context size" in begin for _, begin, _, _ in answers), (name, answers)
    assert results["tokenize with pieces"][0][2] > 5e6 and results["echo"][0][2] > 0.6e6
    slowest = {name: round(1e3 * max(seconds for *_, seconds in answers), 1) for name, answers in results.items()}
    print("longest turns of the event loop, in ms of CPU time:", slowest)
    assert max(slowest.values()) < 50, slowest


def replacing(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def splitting(pattern):
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, bytes_of]}


TOKENIZERS = {
    "backtracking": {"pre_tokenizer": splitting("(x+x+)+y")},
    "backtracking ahead": {"pre_tokenizer": splitting("(?=(q+)+b)q|.")},
    "backtracking normaliser": {"normalizer": replacing("(x+x+)+y", "z", "Regex")},
    "growth by thousands": {"normalizer": {"type": "Sequence", "normalizers": [replacing("o", "o" * 10_000)] * 3}},
    "growth of any text": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 1_000_000}] * 20}
    },
    "nothing replaced": {"normalizer": replacing("", "x")},
}


@pytest.mark.parametrize("changes", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_hostile_tokenizer_is_one_line_within_limits(tmp_path, changes, capfd):
    path = write_tokenizer(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.monotonic()
    with pytest.raises(ModelFileError, match="broken or hostile: fetch the model's own") as error:
        load_tried(tmp_path)
    assert "\n" not in str(error.value) and capfd.readouterr() == ("", "")
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 12 and time.monotonic() - begun < 60


def test_the_limits_of_loading_are_the_kernels(tmp_path, monkeypatch):
    """Whatever the file does: a healthy one under limits that are too small is killed, and the message says so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # one that has passed would not be tried again
    write_tokenizer(tmp_path)
    for limits in (Limits(cpu=0.01, memory=1 << 30), Limits(cpu=10, memory=0)):
        with Zygote(tmp_path, limits=limits) as zygote, pytest.raises(ModelFileError, match="broken or hostile"):
            zygote.load()
    assert load_vocabulary(tmp_path).vocab_size == 258
    path = tmp_path / "tokenizer.json"
    doubling = {"type": "Sequence", "normalizers": [replacing("a", "aa")] * 60}
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": doubling}))
    with (
        Zygote(tmp_path, limits=Limits(cpu=1.0, memory=1 << 30)) as zygote,
        pytest.raises(ModelFileError, match="takes more than 1 s of CPU"),
    ):
        zygote.load()
