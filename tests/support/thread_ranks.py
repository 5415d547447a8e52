"""Ranks as threads of this process: a world without a launcher, and one function run on every rank of it."""

import threading

import msgpack


class ThreadWorld:
    """One rank of a world whose ranks are threads. `hosts` may pretend that ranks are on several."""

    def __init__(self, rank: int, hosts, shared: dict):
        self.rank, self.size, self.hosts = rank, len(hosts), tuple(hosts)
        same = [r for r, host in enumerate(hosts) if host == hosts[rank]]
        self.local_rank, self.local_size = same.index(rank), len(same)
        self.address = "127.0.0.1"
        self._shared, self._barrier, self._turn = shared, shared["barrier"], 0

    def gather(self, value) -> list:
        self._turn ^= 1  # ranks may still read values of the call before
        self._shared[self._turn, self.rank] = msgpack.packb(value)
        self._barrier.wait(60)
        return [msgpack.unpackb(self._shared[self._turn, r], strict_map_key=False) for r in range(self.size)]

    def broadcast(self, value=None):
        return self.gather(value)[0]

    def collect(self, value, seconds: float) -> list | None:
        values = self.gather(value)
        return values if self.rank == 0 else None

    def close(self) -> None:
        pass


def run_threads(hosts, body, seconds: float = 120) -> list:
    """`body(world)` on every rank; the results in rank order. The first error of any rank is raised."""
    hosts = ["here"] * hosts if isinstance(hosts, int) else list(hosts)
    shared = {"barrier": threading.Barrier(len(hosts))}
    results, errors = [None] * len(hosts), []

    def run(rank: int) -> None:
        try:
            results[rank] = body(ThreadWorld(rank, hosts, shared))
        except BaseException as error:
            errors.append(error)
            shared["barrier"].abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        raise (real or errors)[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results
