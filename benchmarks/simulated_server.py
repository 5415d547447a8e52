"""The simulator held against the server: the same requests, played to `ckdist serve` and simulated.

`python benchmarks/simulated_server.py -m smollm2 -t 1` measures the engine's steps (`ckdist bench steps`), starts the
server with the same settings, sends it a random trace over HTTP, and simulates that trace with those steps. It prints
quantiles of the time to the first token and between tokens, as clients saw them and as simulated. What a request
takes beside steps (`--front-end`) is that of short prompts to the idle server, less their step.

A machine that others share is not the same from minute to minute. So the trace is played in `--rounds`, each with a
server of its own and steps that are measured right before it; all steps together and all rounds together are compared.
"""

import argparse
import asyncio
import csv
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
CKDIST = [sys.executable, "-m", "ckdist.cli.main"]
PORT = 18437
SHORT = 8  # tokens of a prompt
PARTS = {"p50": 0.50, "p95": 0.95}
START_SECONDS, REQUEST_SECONDS = 60.0, 120.0
APART = 1000.0  # seconds between the rounds of a simulation


def trace_of(options, seed: int) -> list[tuple[float, int, int]]:
    """Arrival, prompt and output of requests, by random."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / options.rate, int(options.rate * options.seconds)))
    prompt = np.clip(rng.lognormal(np.log(options.prompt), 0.6, len(arrival)), 8, options.context - 200).astype(int)
    output = np.clip(rng.exponential(options.output, len(arrival)), 2, 180).astype(int)
    return list(zip(arrival.tolist(), prompt.tolist(), output.tolist(), strict=True))


async def ask(start: float, row: tuple[float, int, int], rng: np.random.Generator) -> tuple[float, list[float]]:
    """Sends a request when it arrives: seconds to its first token, and between its tokens."""
    arrival, prompt, output = row
    await asyncio.sleep(max(0.0, start + arrival - time.monotonic()))
    ids = rng.integers(100, 40000, prompt).tolist()
    fields = {"prompt": ids, "max_tokens": output, "stream": True, "ignore_eos": True, "seed": 0}
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    begin = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    writer.write(head.encode() + body)
    times = []
    while line := await asyncio.wait_for(reader.readline(), REQUEST_SECONDS):
        if line.startswith(b"data: {"):
            times.append(time.monotonic())
    writer.close()
    if not times:
        sys.exit("the server refused a request")
    return times[0] - begin, np.diff(times[: output or None]).tolist()


async def play(trace: list[tuple[float, int, int]], seed: int) -> tuple[list[float], list[float]]:
    """Waits for first tokens and between tokens of all requests."""
    start, rng = time.monotonic() + 0.5, np.random.default_rng(seed)
    found = await asyncio.gather(*(ask(start, row, rng) for row in trace))
    return [first for first, _ in found], [gap for _, gaps in found for gap in gaps]


def served(options, trace, seed: int) -> tuple[list[float], list[float], list[float]]:
    """What clients of a server of its own saw: first tokens of SHORT prompts alone, first tokens, and gaps."""
    server = subprocess.Popen(
        [*CKDIST, "serve", *settings(options), "--port", str(PORT), "--repack", "off"],
        env=ENVIRONMENT, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        end = time.monotonic() + START_SECONDS
        while not ready():
            if time.monotonic() > end or server.poll() is not None:
                sys.exit("the server did not start")
            time.sleep(0.2)
        asyncio.run(play([(0.0, 64, 8), (0.5, 200, 8)], seed + 1))  # pages and caches are warm from here on
        short = [asyncio.run(play([(0.0, SHORT, 2)], seed + 2 + i))[0][0] for i in range(5)]
        return short, *asyncio.run(play(trace, seed))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


def ready() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def simulated(options, traces, steps: list[dict], front_end: float) -> dict[str, dict[str, float]]:
    """The same traces in simulated time, one long after the other."""
    with tempfile.TemporaryDirectory() as folder:
        rows, costs = pathlib.Path(folder, "trace.csv"), pathlib.Path(folder, "steps.json")
        costs.write_text(json.dumps(steps))
        with rows.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("arrival", "prompt", "output"))
            for number, trace in enumerate(traces):
                writer.writerows((arrival + number * APART, prompt, tokens) for arrival, prompt, tokens in trace)
        words = [*settings(options)[4:], "--steps", str(costs), "--trace", str(rows), "--json"]
        words += ["--front-end", f"{front_end:.6f}", "--duration", str(len(traces) * APART)]
        return json.loads(output([*CKDIST, "simulate", *words]))


def settings(options) -> list[str]:
    """What the server, the bench and the simulation have in common; the first four are of the model's ranks."""
    sizes = ["-c", options.context, "-ub", options.ubatch, "-np", options.parallel]
    return [str(word) for word in ("-m", options.model, "-t", options.threads, *sizes)]


def output(words: list[str]) -> str:
    return subprocess.run(
        words, env=ENVIRONMENT, cwd=ROOT, check=True, capture_output=True, text=True, timeout=600
    ).stdout


def quantiles(values: list[float]) -> dict[str, float]:
    return {name: float(np.quantile(values, part)) for name, part in PARTS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--prompt", type=float, default=250, help="median tokens")
    parser.add_argument("--output", type=float, default=10, help="mean tokens")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--ubatch", type=int, default=128)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    steps, traces, short, first, gaps = [], [], [], [], []
    for number in range(options.rounds):
        seed = options.seed + 100 * number
        traces.append(trace_of(options, seed))
        steps += json.loads(output([*CKDIST, "bench", "steps", *settings(options), "-r", "2", "-o", "json"]))
        for all_of, found in zip((short, first, gaps), served(options, traces[-1], seed), strict=True):
            all_of += found
    alone = [row["seconds"] for row in steps if row["prompt_tokens"] == SHORT]
    front_end = max(0.0, statistics.median(short) - statistics.median(alone))
    found = simulated(options, traces, steps, front_end)
    print(f"{len(first)} requests, {len(gaps)} gaps; beside steps {1e3 * front_end:.1f} ms\n")
    print("| | server, ms | simulated, ms | ratio |\n|---|---|---|---|")
    for what, seen in (("first_token", first), ("between_tokens", gaps)):
        for part, value in quantiles(seen).items():
            shown = f"{1e3 * value:.1f} | {1e3 * found[what][part]:.1f} | {found[what][part] / value:.2f}"
            print(f"| {what.replace('_', ' ')}, {part} | {shown} |")


if __name__ == "__main__":
    main()
