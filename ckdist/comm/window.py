"""Memory that the ranks of a communicator read and write without the help of its owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ckdist import native
from ckdist.comm.operation import Operation

if TYPE_CHECKING:
    from ckdist.comm.communicator import Communicator


class Window:
    """Memory of every rank that the others put to and get from.

    `notify` counts in one of a rank's slots (0 to 65535), `wait` waits for a count. The array stays alive as long as
    the communicator, because peers may write it.

    Between ranks of one host an array from `allocate` is written and read in place, and its owner may do what it likes.
    Any other array is served by its owner while that waits in a call of its communicator: a `get` from a rank that only
    computes takes until its next call (or the timeout), and what was `put` to it is there when its `wait` returns.
    """

    def __init__(self, communicator: Communicator, number: int, array: np.ndarray) -> None:
        """`number`: which of the communicator's windows this is, the same on every rank."""
        self._communicator, self.number, self.array = communicator, number, array
        communicator.keep(array)
        native.check(native.lib.ckdist_expose(communicator.handle, number, native.pointer(array), array.nbytes))

    def put(self, data: np.ndarray, rank: int, offset: int = 0) -> Operation[None]:
        """Writes `data` at byte `offset` of `rank`'s array; complete when `data` may change.

        `notify` tells the rank.
        """
        return self._communicator.start(
            lambda out: native.lib.ckdist_iput(
                self._communicator.handle, rank, self.number, offset, native.pointer(data), data.nbytes, out
            ),
            None,
            data,
            self,
        )

    def get(self, out: np.ndarray, rank: int, offset: int = 0) -> Operation[np.ndarray]:
        """Reads `out` from byte `offset` of `rank`'s array."""
        return self._communicator.start(
            lambda o: native.lib.ckdist_iget(
                self._communicator.handle, rank, self.number, offset, native.pointer(out), out.nbytes, o
            ),
            out,
            self,
        )

    def notify(self, rank: int, slot: int = 0) -> Operation[None]:
        """Adds one to a counter of `rank`, after everything put to it before."""
        return self._communicator.start(
            lambda out: native.lib.ckdist_inotify(self._communicator.handle, rank, self.number, slot, out), None, self
        )

    def wait(self, count: int, slot: int = 0) -> None:
        """Returns when this rank's counter has reached `count`."""
        native.check(native.lib.ckdist_await_notified(self._communicator.handle, self.number, slot, count))
