"""What a page that shows the machine costs a running server, in speed of decode.

    python benchmarks/page_cost.py URL [--pairs 40] [--tokens 300] [--pages 1]

Answers of one client alternate, with pages open and without; an open page is a client that reads /v1/machine. Prints
the median of the ratios of their speeds, and the bounds within which it lies with 95 %.
"""

import argparse
import contextlib
import math
import threading
from collections.abc import Iterator

import httpx

from ckdist.planning.paired_test import median_within

SECONDS = 60.0
WARM = 3  # answers before the first pair


def decode_speed(client: httpx.Client, tokens: int) -> float:
    """Generated tokens of a second, by the server's own clock."""
    body = {"prompt": "The sea", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return answer.json()["timings"]["predicted_per_second"]


@contextlib.contextmanager
def open_pages(url: str, count: int) -> Iterator[None]:
    """So many clients read the machine's events meanwhile."""
    ended, begun = threading.Event(), threading.Barrier(count + 1)

    def read() -> None:
        """One client, until the end."""
        with httpx.stream("GET", f"{url}/v1/machine", timeout=SECONDS) as answer:
            begun.wait(SECONDS)
            for _ in answer.iter_lines():
                if ended.is_set():
                    return

    threads = [threading.Thread(target=read) for _ in range(count)]
    for thread in threads:
        thread.start()
    begun.wait(SECONDS)
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--pages", type=int, default=1)
    given = parser.parse_args()
    logs = []
    with httpx.Client(base_url=given.url, timeout=SECONDS) as client:
        for _ in range(WARM):
            decode_speed(client, given.tokens)
        for pair in range(given.pairs):
            speeds = {}
            for pages in (0, given.pages) if pair % 2 else (given.pages, 0):
                with open_pages(given.url, pages) if pages else contextlib.nullcontext():
                    speeds[pages] = decode_speed(client, given.tokens)
            logs.append(math.log(speeds[given.pages] / speeds[0]))
    low, middle, high = map(math.exp, median_within(logs))
    print(f"{given.pages} page(s) to none, {given.pairs} pairs: {middle:.4f} ({low:.4f} to {high:.4f})")


if __name__ == "__main__":
    main()
