"""A call of a communicator that is still under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from ckdist import native

if TYPE_CHECKING:
    from ckdist.comm.communicator import Communicator
    from ckdist.native import CData

Result = TypeVar("Result")


class Operation(Generic[Result]):
    """Something under way. `wait` returns its result; the arrays it uses stay alive until then."""

    def __init__(self, communicator: Communicator, handle: CData, result: Result, *used: object) -> None:
        """`used`: what must stay alive until the operation is complete."""
        self._communicator, self._handle, self._result = communicator, handle, result
        self._used = (result, *used)
        communicator.under_way.add(self)

    def test(self) -> bool:
        """Is it complete? Never blocks; messages make progress in it."""
        if self._handle is not None and native.check(native.lib.ckdist_operation_test(self._handle)):
            self._finish()
        return self._handle is None

    def wait(self) -> Result:
        """Its result, once complete. CommError when a peer is lost."""
        if self._handle is not None:
            try:
                native.check(native.lib.ckdist_operation_wait(self._handle))
            finally:
                self._finish()
        return self._result

    def _finish(self) -> None:
        """The communicator need not keep it any longer."""
        self._handle = None
        self._communicator.under_way.discard(self)
