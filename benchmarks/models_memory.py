"""Memory of a server with SmolLM2 and two tiny models under `--models-memory`, while eight clients alternate.

    python -m benchmarks.models_memory MODEL [--limit 800M] [--requests 96] [FLAGS of ckdist serve]

Prints the largest sums of RSS and PSS of all processes and of the models' jobs alone, the number of loads, and whether
each answer had the bits that it has alone. Unloads happen by eviction and by /models/unload.
"""

import argparse
import pathlib
import random
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil

from ckdist.engine.load_model import BUNDLED
from tests.support.running import running

CLIENTS = 8
NAMES = ("smol", "tiny", "small")
TABLE = """
[[model]]
name = "smol"
path = "{model}"
ctx_size = 2048
[[model]]
name = "tiny"
path = "{bundled}"
ctx_size = 512
[[model]]
name = "small"
path = "{bundled}"
ctx_size = 256
"""


class Memory:
    """Samples the memory of all descendants of this process until the block ends."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.1):
            sums: dict[str, int] = {}
            for process in psutil.Process().children(recursive=True):
                try:
                    is_job, info = "ckdist.cli.child_engine" in process.cmdline(), process.memory_full_info()
                except psutil.Error:
                    continue
                for kind in ("rss", "pss", "uss"):
                    for of in ("all", "jobs") if is_job else ("all",):
                        sums[f"{kind} of {of}"] = sums.get(f"{kind} of {of}", 0) + getattr(info, kind)
            for name, size in sums.items():
                self.peaks[name] = max(self.peaks.get(name, 0), size)


def ask(http: httpx.Client, model: str, prompt: str) -> str:
    """The model's greedy answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    answer = http.post("/v1/completions", json=body)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    return f"{choice['text']} {choice['logprobs']['token_logprobs']}"


def client(http: httpx.Client, number: int, requests: int, expected: dict[tuple[str, str], str]) -> int:
    """Sends requests to the models in turn. Returns the number of answers that differ from those alone."""
    rng, wrong = random.Random(number), 0
    for _ in range(requests):
        key = rng.choice(list(expected))
        wrong += ask(http, *key) != expected[key]
        if rng.random() < 0.1:
            http.post("/models/unload", json={"model": rng.choice(NAMES)})  # a 409 if it has requests
    return wrong


def main() -> None:
    """Runs the server and the clients."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--limit", default="800M")
    parser.add_argument("--requests", type=int, default=96, help="of all clients")
    given, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        table = pathlib.Path(folder) / "models.toml"
        table.write_text(TABLE.format(model=pathlib.Path(given.model).absolute(), bundled=BUNDLED))
        more = ("--models-memory", given.limit, *flags)
        with (
            Memory() as memory,
            running("--models", str(table), *more, threads=()) as url,
            httpx.Client(base_url=url, timeout=600) as http,
        ):
            prompts = [f"def f{i}(" for i in range(3)]
            expected = {(name, prompt): ask(http, name, prompt) for name in NAMES for prompt in prompts}
            begin = time.monotonic()
            with ThreadPoolExecutor(CLIENTS) as pool:
                each = given.requests // CLIENTS
                wrong = sum(pool.map(lambda number: client(http, number, each, expected), range(CLIENTS)))
            seconds = time.monotonic() - begin
            models = http.get("/models").json()["data"]
            metrics = http.get("/metrics").text
    print(f"{CLIENTS} clients, {each * CLIENTS} requests in {seconds:.0f} s; {wrong} answers differ from those alone")
    print("shares:", ", ".join(f"{m['id']} {m['memory_bytes'] / 2**20:.0f} MiB" for m in models))
    for name, size in sorted(memory.peaks.items()):
        print(f"largest {name}: {size / 2**20:.0f} MiB, limit {given.limit}")
    print(*(line for line in metrics.splitlines() if line.startswith("ckdist_model_l")), sep="\n")


if __name__ == "__main__":
    main()
