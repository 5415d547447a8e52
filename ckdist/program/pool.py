"""The threads of a rank. Its executables and its optimizer share them; the calling thread is the first of them."""

from collections.abc import Sequence

from ckdist import native
from ckdist.topology.machine import this_machine

SPINS = 2000


class ThreadPool:
    """A native thread pool, until `close`.

    Args:
        threads: Number of threads, with the calling one. Raises ConfigError if it is less than 1.
        cpus: CPUs to pin the threads to, one each. Fewer CPUs than threads: no pinning.
        spins: Polls before a waiting thread sleeps. Default: SPINS.
    """

    def __init__(self, threads: int, cpus: Sequence[int] = (), spins: int | None = None):
        self.threads = threads
        pins = cpus[:threads] if len(cpus) >= threads else None
        caches = this_machine().caches(pins) if pins else None
        self.handle = native.new(native.lib.ckdist_pool_new, threads, pins, caches, spins or SPINS)

    def close(self) -> None:
        """Ends the threads once no native object uses them. The calling thread then has its old CPU affinity."""
        native.ffi.release(self.handle)
