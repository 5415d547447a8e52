"""A link between two hosts that carries nothing for some seconds, while it serves streams and while it trains.

    python benchmarks/link_cuts.py [SECONDS...]

Prints for each outage if the job survived it, the longest pause of a stream or of the training, if texts and losses
were those of an undisturbed run, or the line with which a rank ended and the seconds from the cut until then. The ranks
run with the default `--comm-timeout` of 8 s. Needs root, ip and tc.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from benchmarks.limited_links import Host, network, run

WAYS = "both ways", "to rank 0", "to rank 1"
NOBODY = "02:00:00:00:00:99"  # a link address that no host has
STREAMS, TOKENS, STEPS, BEFORE = 8, 1500, 3000, 1.5
URL = "http://127.0.0.1:8080"


class Ranks:
    """The two processes of a job, and the lines that they print."""

    def __init__(self, hosts: list[Host], folder: Path, words: list[str]) -> None:
        secret = folder / "secret"
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(16))
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29556"}
        common |= {"CKDIST_JOB_SECRET_FILE": str(secret)}
        self.lines: tuple[list[tuple[float, str]], ...] = ([], [])
        self.processes = [
            subprocess.Popen(
                host.command([sys.executable, "-m", "ckdist.cli.main", *words]),
                env=os.environ | common | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, host in enumerate(hosts)
        ]
        for rank in range(2):
            threading.Thread(target=self._read, args=(rank,), daemon=True).start()

    def _read(self, rank: int) -> None:
        stream = self.processes[rank].stdout
        for line in stream or ():
            self.lines[rank].append((time.monotonic(), line.strip()))

    def named(self, since: float) -> str:
        """The lines that name a lost rank, with the seconds from `since` until each."""
        found = [
            f"rank {rank} after {when - since:.1f} s: {line}"
            for rank in range(2)
            for when, line in self.lines[rank]
            if when > since and ("not been heard of" in line or "does not answer" in line or "gave up" in line)
        ]
        return "; ".join(found)

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def cut(hosts: list[Host], way: str, down: bool) -> None:
    """Sends packets to an address that no host has, or to the right host again."""
    for source, target in (hosts, hosts[::-1]):
        if way not in ("both ways", f"to rank {hosts.index(target)}"):
            continue
        link = f"{source.name[:-2]}e{hosts.index(source)}"
        entry = [target.address, "dev", link]
        if down:
            run("ip", "-n", source.name, "neigh", "replace", *entry, "lladdr", NOBODY, "nud", "permanent")
        else:
            run("ip", "-n", source.name, "neigh", "del", *entry)


def streams() -> None:
    """In the first host: prints the texts of STREAMS streams, their status, and the longest pause of each."""
    found: list[tuple[str, float, bool]] = [("", 0.0, False)] * STREAMS

    def read(index: int) -> None:
        body = {"prompt": f"def f{index}(", "max_tokens": TOKENS, "temperature": 0.8, "seed": index, "stream": True}
        text, last, longest, whole = "", time.monotonic(), 0.0, False
        try:
            request = body | {"ignore_eos": True}
            with httpx.stream("POST", f"{URL}/v1/completions", json=request, timeout=120) as answer:
                for line in answer.iter_lines():
                    longest, last = max(longest, time.monotonic() - last), time.monotonic()
                    if line.startswith("data: {"):
                        text += (json.loads(line[6:]).get("choices") or [{"text": ""}])[0]["text"]
                    whole |= line == "data: [DONE]"
        except httpx.HTTPError:
            pass
        found[index] = text, longest, whole

    threads = [threading.Thread(target=read, args=(i,)) for i in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(found))


def disturbed(hosts: list[Host], way: str, seconds: float) -> float:
    """Cuts the link for some seconds and returns when it did."""
    begun = time.monotonic()
    if seconds:
        cut(hosts, way, True)
        time.sleep(seconds)
        cut(hosts, way, False)
    return begun


def serve(hosts: list[Host], folder: Path, way: str, seconds: float) -> tuple[bool, float, object, str]:
    """Survived, longest pause, texts, and the lines that name a rank."""
    ranks = Ranks(hosts, folder, ["serve", "-tp", "2", "-t", "1"])
    try:
        until = time.monotonic() + 60
        while not any("serving " in line for _, line in ranks.lines[0]):
            if time.monotonic() > until or ranks.processes[0].poll() is not None:
                raise SystemExit(f"it does not start: {ranks.lines}")
            time.sleep(0.1)
        client = subprocess.Popen(
            hosts[0].command([sys.executable, "-m", "benchmarks.link_cuts", "streams"]), stdout=subprocess.PIPE
        )
        time.sleep(BEFORE)
        begun = disturbed(hosts, way, seconds)
        found = json.loads(client.communicate(timeout=200)[0])
        time.sleep(1)
        return all(w for *_, w in found), max(p for _, p, _ in found), [t for t, *_ in found], ranks.named(begun)
    finally:
        ranks.end()


def train(hosts: list[Host], folder: Path, way: str, seconds: float) -> tuple[bool, float, object, str]:
    """Survived, longest pause between two steps, losses, and the lines that name a rank."""
    out = folder / f"out-{time.monotonic_ns()}"
    text = folder / "text.txt"
    text.write_text("".join(f"{a} and {b} are {a + b}.\n" for a in range(40) for b in range(40)))
    config = folder / "train.toml"
    config.write_text(
        f'output_dir = "{out}"\ntrain_file = ["{text}"]\nmax_length = 64\nper_device_train_batch_size = 4\n'
        f"max_steps = {STEPS}\nlearning_rate = 1e-3\nlogging_steps = 1\nsave_steps = 0\nthreads = 1\n"
        "[model_config]\nvocab_size = 300\nhidden_size = 32\nintermediate_size = 48\nnum_hidden_layers = 2\n"
        "num_attention_heads = 4\nnum_key_value_heads = 2\ntie_word_embeddings = true\n"
    )
    ranks, metrics = Ranks(hosts, folder, ["train", str(config)]), out / "metrics.jsonl"
    try:
        until = time.monotonic() + 60
        while not metrics.exists() or metrics.stat().st_size < 2000:
            if time.monotonic() > until or ranks.processes[0].poll() is not None:
                raise SystemExit(f"it does not start: {ranks.lines}")
            time.sleep(0.05)
        begun = disturbed(hosts, way, seconds)
        size, last, longest = 0, begun, 0.0
        while ranks.processes[0].poll() is None and time.monotonic() < begun + 200:
            if (now := metrics.stat().st_size) != size:
                size, longest, last = now, max(longest, time.monotonic() - last), time.monotonic()
            time.sleep(0.02)
        losses = [(row["step"], row["loss"]) for row in map(json.loads, metrics.read_text().splitlines())]
        return ranks.processes[0].returncode == 0, longest, losses, ranks.named(begun)
    finally:
        ranks.end()


def main(outages: list[float]) -> None:
    """Prints the table."""
    kinds: dict[str, Callable[..., tuple[bool, float, object, str]]] = {"serving": serve, "training": train}
    with tempfile.TemporaryDirectory() as name, network(2, 1000) as hosts:
        folder = Path(name)
        whole = {}
        for kind, job in kinds.items():
            survived, pause, whole[kind], _ = job(hosts, folder, "", 0)
            if not survived:
                raise SystemExit(f"{kind} ended without an outage")
            print(f"{kind} without an outage: longest pause {pause:.2f} s", flush=True)
        print("| work | cut | seconds | outcome |\n|---|---|---|---|")
        for kind, job in kinds.items():
            for way in WAYS:
                for seconds in outages:
                    survived, pause, got, named = job(hosts, folder, way, seconds)
                    same = "the same results" if got == whole[kind] else "OTHER RESULTS"
                    outcome = f"survived, pause {pause:.1f} s, {same}" if survived else f"ended; {named}"
                    print(f"| {kind} | {way} | {seconds:g} | {outcome} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["streams"]:
        streams()
    else:
        main([float(word) for word in sys.argv[1:]] or [1.0, 3.0, 5.0, 7.0])
