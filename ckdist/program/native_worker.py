"""Python interface of a rank's native loop of commands (native/api/commands_api.h)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ckdist import native
from ckdist.program.pool import ThreadPool
from ckdist.topology.binding import own_cpus

if TYPE_CHECKING:  # a program does not need the modules that open a communicator
    from ckdist.comm.communicator import Communicator

COMMANDS = native.numbers("ckdist_command_kind", "ckdist_command_")
_NAMES = {number: name for name, number in COMMANDS.items()}


class NativeWorker:
    """Executes rank 0's commands on this rank. Its models share one pool of threads.

    Args:
        communicator: All ranks of the job. It must outlive the worker.
        threads: Threads of the pool.
        cpus: CPUs to pin the threads to, one each. Fewer CPUs than threads: no pinning.
        spins: Polls before a waiting thread sleeps.
    """

    def __init__(self, communicator: "Communicator", threads: int, cpus: Sequence[int], spins: int) -> None:
        self.communicator = communicator
        self.cpus = own_cpus()  # of the rank; the pool pins the calling thread to one of them
        self.pool = ThreadPool(threads, cpus, spins)
        self.handle = native.new(native.lib.ckdist_worker_new, communicator.handle)
        self.failed = False  # a command has failed; the other ranks have stopped as well
        self._copies = 0

    def add(self, model: int, executable: native.CData) -> None:
        """Adds a model, which may then run. A collective call while no step is in flight."""
        native.call(native.lib.ckdist_worker_add, self.handle, model, executable)

    def send(self, kind: str, model: int = 0) -> None:
        """Rank 0: publishes a command that has no data. No step may be in flight."""
        command = native.struct("ckdist_command", kind=COMMANDS[kind], model=model)
        size = native.ffi.sizeof("struct ckdist_command") // 4
        self.publish(native.ffi.cast("int32_t *", command), size)

    def publish(self, message: native.CData, ints: int) -> None:
        """Rank 0: publishes a command of `ints` int32 numbers."""
        self._check(native.lib.ckdist_worker_publish(self.handle, message, ints))

    def publish_copy(self, message: native.CData, ints: int) -> int:
        """Rank 0: publishes a copy of blocks. Returns its number, which counts those of all models."""
        self.publish(message, ints)
        self._copies += 1
        return self._copies

    def run(self) -> None:
        """Rank 0: runs its own part of the oldest published step."""
        self._check(native.lib.ckdist_worker_run(self.handle))

    def work(self) -> tuple[str, int]:
        """Ranks other than 0: executes commands until one that Python executes, or "stop".

        Returns:
            The command's kind and model.
        """
        command = native.call(native.lib.ckdist_worker_work, self.handle)
        return _NAMES[command.kind], command.model

    def report(self, model: int) -> np.ndarray:
        """Rank 0, while no step is in flight: `struct ckdist_step_stats` of a model on each rank."""
        out = np.zeros(self.communicator.size, native.dtype("ckdist_step_stats"))
        native.call(native.lib.ckdist_worker_report, self.handle, model, out)
        return out

    def copy_results(self) -> np.ndarray:
        """Rank 0, while no step is in flight: `struct ckdist_copy_results` of each rank."""
        out = np.zeros(self.communicator.size, native.dtype("ckdist_copy_results"))
        native.call(native.lib.ckdist_worker_copy_results, self.handle, out)
        return out

    def trace(self, handle: native.CData) -> None:
        """Writes the copies of blocks to the native trace `handle`, which must outlive the worker."""
        native.call(native.lib.ckdist_worker_trace, self.handle, handle)

    def close(self) -> None:
        """Frees the worker. Its threads end with the last executable."""
        if self.handle is not None:
            native.ffi.release(self.handle)
            self.handle = None
            self.pool.close()

    def _check(self, status: int) -> None:
        self.failed |= status < 0
        native.check(status)
