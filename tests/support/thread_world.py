"""A world whose ranks are threads of this process: what `ckdist.comm.world` gives ranks that are processes."""

import threading


class ThreadWorld:
    """One rank's view. Made for all ranks at once by `run_ranks_as_threads`."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list):
        self.rank, self.size, self.local_rank, self.local_size = rank, size, rank, size
        self.hosts = ("here",) * size
        self._barrier, self._board = barrier, board

    def gather(self, value) -> list:
        self._board[self.rank] = value
        self._barrier.wait()
        values = list(self._board)
        self._barrier.wait()
        return values

    def broadcast(self, value=None):
        return self.gather(value)[0]

    def collect(self, value, seconds: float) -> list | None:
        values = self.gather(value)
        return values if self.rank == 0 else None

    def close(self) -> None:
        pass


def run_ranks_as_threads(size: int, body) -> list:
    """body(world) on a thread per rank; what they returned, in rank order. The first error is raised."""
    barrier, board, results, raised = threading.Barrier(size, timeout=60), [None] * size, [None] * size, []

    def work(rank: int) -> None:
        try:
            results[rank] = body(ThreadWorld(rank, size, barrier, board))
        except BaseException as error:
            raised.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    return results
