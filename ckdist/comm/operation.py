"""A call of a communicator that is not complete yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from ckdist import native

if TYPE_CHECKING:
    from ckdist.comm.communicator import Communicator
    from ckdist.native import CData

Result = TypeVar("Result")


class Operation(Generic[Result]):
    """An operation that has started. The arrays that it uses stay alive until it is complete.

    Args:
        communicator: The communicator that keeps it alive.
        result: Returned by `wait`.
        used: Objects that must stay alive until then.
    """

    def __init__(self, communicator: Communicator, handle: CData, result: Result, *used: object) -> None:
        self._communicator, self._handle, self._result = communicator, handle, result
        self._used = (result, *used)
        communicator.under_way.add(self)

    def test(self) -> bool:
        """Returns whether it is complete. Never blocks; progresses messages."""
        if self._handle is not None and native.check(native.lib.ckdist_operation_test(self._handle)):
            self._finish()
        return self._handle is None

    def wait(self) -> Result:
        """Blocks until it is complete and returns its result. Raises CommError if a peer is lost."""
        if self._handle is not None:
            try:
                native.check(native.lib.ckdist_operation_wait(self._handle))
            finally:
                self._finish()
        return self._result

    def _finish(self) -> None:
        self._handle = None
        self._communicator.under_way.discard(self)
