"""Memory that ranks read and write without a matching call of its owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ckdist import native
from ckdist.comm.operation import Operation

if TYPE_CHECKING:
    from ckdist.comm.communicator import Communicator


class Window:
    """An array on every rank that the other ranks `put` to and `get` from.

    `notify` increments a counter of a rank (slots 0 to 65535) and `wait` waits for a count. The array stays alive as
    long as the communicator, because peers may write it.

    Between ranks of one host, an array from `allocate` is accessed in place. Any other array is served by its owner
    while the owner waits in a call of its communicator. A `get` from a rank that only computes therefore takes until
    that rank's next call (or the timeout). Data that was `put` is visible when the owner's `wait` returns.

    Args:
        number: Index of the window in the communicator, the same on every rank.
        array: This rank's memory.
    """

    def __init__(self, communicator: Communicator, number: int, array: np.ndarray) -> None:
        self._communicator, self.number, self.array = communicator, number, array
        communicator.keep(array)
        native.check(native.lib.ckdist_expose(communicator.handle, number, native.pointer(array), array.nbytes))

    def put(self, data: np.ndarray, rank: int, offset: int = 0) -> Operation[None]:
        """Writes `data` at byte `offset` of `rank`'s array. Complete when `data` may change; `notify` signals it."""
        return self._communicator.begin(
            lambda out: native.lib.ckdist_iput(
                self._communicator.handle, rank, self.number, offset, native.pointer(data), data.nbytes, out
            ),
            None,
            data,
            self,
        )

    def get(self, out: np.ndarray, rank: int, offset: int = 0) -> Operation[np.ndarray]:
        """Reads `out` from byte `offset` of `rank`'s array."""
        return self._communicator.begin(
            lambda o: native.lib.ckdist_iget(
                self._communicator.handle, rank, self.number, offset, native.pointer(out), out.nbytes, o
            ),
            out,
            self,
        )

    def notify(self, rank: int, slot: int = 0) -> Operation[None]:
        """Increments a counter of `rank`, after all earlier puts to it."""
        return self._communicator.begin(
            lambda out: native.lib.ckdist_inotify(self._communicator.handle, rank, self.number, slot, out), None, self
        )

    def wait(self, count: int, slot: int = 0) -> None:
        """Blocks until this rank's counter has reached `count`."""
        native.check(native.lib.ckdist_await_notified(self._communicator.handle, self.number, slot, count))
