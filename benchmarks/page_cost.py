"""What a page that shows the machine costs a running server on this machine, in speed of decode and in CPU time.

    python benchmarks/page_cost.py URL [--pairs 40] [--tokens 300] [--pages 1]

Answers of one client alternate, with pages open and without; an open page is a client that reads /v1/machine. Prints
the median of the ratios of their speeds, of the CPU seconds that rank 0 takes for a token, and of those that all of the
server's processes take, each with the bounds within which it lies with 95 %. A server of one thread (-t 1) waits for
nobody by spinning, so its CPU time is its work: that says more on a noisy machine than its speed.
"""

import argparse
import contextlib
import math
import threading
from collections.abc import Iterator

import httpx
import psutil
from median_bounds import median_within

SECONDS = 60.0
WARM = 3  # answers before the first pair


def decode_speed(client: httpx.Client, tokens: int) -> float:
    """Generated tokens of a second, by the server's own clock."""
    body = {"prompt": "The sea", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return answer.json()["timings"]["predicted_per_second"]


class Server:
    """The processes behind a port of this machine."""

    def __init__(self, url: str) -> None:
        port = httpx.URL(url).port
        listening = [c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port]
        found = [psutil.Process(pid) for pid in listening if pid is not None]
        http = [process for process in found if "ckdist.serve" in process.cmdline()]
        if not http:
            raise SystemExit(f"no server's process of this machine listens on port {port}")
        parent = http[0].parent()
        assert parent is not None, "rank 0 has started it"
        self.rank, self.others = parent, parent.children(recursive=True)

    def seconds(self) -> tuple[float, float]:
        """Of CPU: what rank 0 has taken, and what all have."""
        rank, *others = (sum(process.cpu_times()[:2]) for process in (self.rank, *self.others))
        return rank, rank + sum(others)


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
    names = ("speed", "CPU seconds of rank 0", "CPU seconds of all processes")
    logs: dict[str, list[float]] = {name: [] for name in names}
    server = Server(given.url)
    with httpx.Client(base_url=given.url, timeout=SECONDS) as client:
        for _ in range(WARM):
            decode_speed(client, given.tokens)
        for pair in range(given.pairs):
            found = {}
            for pages in (0, given.pages) if pair % 2 else (given.pages, 0):
                with open_pages(given.url, pages) if pages else contextlib.nullcontext():
                    before = server.seconds()
                    speed = decode_speed(client, given.tokens)
                    used = [after - begin for after, begin in zip(server.seconds(), before, strict=True)]
                found[pages] = (speed, *used)
            for name, shown, plain in zip(names, found[given.pages], found[0], strict=True):
                logs[name].append(math.log(shown / plain))
    for name, values in logs.items():
        low, middle, high = map(math.exp, median_within(values))
        print(f"{name}, {given.pages} page(s) to none, {given.pairs} pairs: {middle:.4f} ({low:.4f} to {high:.4f})")


if __name__ == "__main__":
    main()
