"""A rank's threads, which its executables and its optimizer share; the thread that calls is the first of them."""

from collections.abc import Sequence

from ckdist import native


class ThreadPool:
    """`cpus` pins the threads, one each, unless there are fewer. `spins`: polls before a waiting thread sleeps.

    ConfigError unless there is a thread.
    """

    def __init__(self, threads: int, cpus: Sequence[int] = (), spins: int = 2000):
        self.threads = threads
        cpu_array = native.ffi.new("int32_t[]", list(cpus[:threads])) if len(cpus) >= threads else native.ffi.NULL
        out = native.ffi.new("struct ckdist_pool **")
        native.check(native.lib.ckdist_pool_new(threads, cpu_array, spins, out))
        self.handle = native.ffi.gc(out[0], native.lib.ckdist_pool_free)

    def close(self) -> None:
        """Ends the threads as soon as nothing native works with them any more; the thread that called has its CPUs
        back then.
        """
        native.ffi.release(self.handle)
