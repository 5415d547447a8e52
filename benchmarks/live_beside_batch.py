"""Time to the first token of live requests: an idle server against the same server with a batch (`/v1/batches`).

    python -m benchmarks.live_beside_batch MODEL [--requests 20] [--rounds 5] [--prompt 200] [FLAGS of ckdist serve]

Rounds without and with a batch alternate. Prints the median and the 95th percentile of both, and their ratios.
"""

import argparse
import json
import random
import statistics
import tempfile
import time

import httpx

from tests.support.running import running

ENDED = ("completed", "failed", "cancelled", "expired")
LINES = 2000


def text(rng: random.Random, words: int) -> str:
    """A text that no earlier one begins with."""
    return " ".join(str(rng.randrange(10**4)) for _ in range(max(1, words)))


def first_token(http: httpx.Client, prompt: str) -> float:
    """Seconds from a request to the first token of its answer."""
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "stream": True}
    begin, seconds = time.perf_counter(), 0.0
    with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {") and not seconds:
                seconds = time.perf_counter() - begin
    return seconds


def begin_batch(http: httpx.Client, rng: random.Random, given: argparse.Namespace) -> str:
    """Starts a batch that outlasts the round. Returns its id after its first results."""
    bodies = (
        {"prompt": text(rng, rng.randint(1, given.batch_prompt // 2)), "max_tokens": rng.randint(8, 64), "ignore_eos": True}
        for _ in range(LINES)
    )
    lines = (
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i, body in enumerate(bodies)
    )
    content = "\n".join(map(json.dumps, lines)).encode()
    file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}).json()["id"]
    fields = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = http.post("/v1/batches", json=fields).json()["id"]
    while not completed(http, batch):
        time.sleep(0.1)
    return batch


def completed(http: httpx.Client, batch: str) -> int:
    """Lines with results. Raises RuntimeError if the batch has ended."""
    found = http.get(f"/v1/batches/{batch}").json()
    if found["status"] in ENDED:
        raise RuntimeError(f"the batch is {found['status']}; raise LINES")
    return found["request_counts"]["completed"]


def cancel(http: httpx.Client, batch: str) -> None:
    """Cancels the batch and waits for its end."""
    http.post(f"/v1/batches/{batch}/cancel")
    while http.get(f"/v1/batches/{batch}").json()["status"] not in ENDED:
        time.sleep(0.1)


def main() -> None:
    """Runs the rounds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=20, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a live prompt, about")
    parser.add_argument("--batch-prompt", type=int, default=800, help="most tokens of a prompt of the batch, about")
    parser.add_argument("--pause", type=float, default=0.3, help="mean seconds between live requests")
    given, flags = parser.parse_known_args()
    rng, seconds = random.Random(1), {"idle": list[float](), "batch": list[float]()}
    with (
        tempfile.TemporaryDirectory() as room,
        running("-m", given.model, "--batch-dir", room, *flags, threads=()) as url,
        httpx.Client(base_url=url, timeout=300) as http,
    ):
        for number in range(given.rounds + 1):
            for case in seconds:
                batch = begin_batch(http, rng, given) if case == "batch" else ""
                before = completed(http, batch) if batch else 0
                begin = time.perf_counter()
                found = []
                for _ in range(given.requests):
                    time.sleep(rng.expovariate(1 / given.pause))
                    found.append(first_token(http, text(rng, given.prompt // 2)))
                if batch:
                    rate = (completed(http, batch) - before) / (time.perf_counter() - begin)
                    print(f"round {number}: the batch had {rate:.2f} lines/s", flush=True)
                    cancel(http, batch)
                if number:  # the first round warms up
                    seconds[case] += found
    median, late = ({case: point(s) for case, s in seconds.items()} for point in (statistics.median, percentile))
    for name, found in (("median", median), ("95th percentile", late)):
        print(f"{name}: idle {1e3 * found['idle']:.0f} ms, with a batch {1e3 * found['batch']:.0f} ms, "
              f"{found['batch'] / found['idle']:.2f} times")  # fmt: skip


def percentile(values: list[float]) -> float:
    """The 95th percentile."""
    return statistics.quantiles(values, n=20)[-1]


if __name__ == "__main__":
    main()
