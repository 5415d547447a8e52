"""A call of a communicator that is not complete yet."""

from typing import Any, Generic, TypeVar

from ckdist import native

Result = TypeVar("Result")


class Operation(Generic[Result]):
    """An operation that has started. The arrays that it uses stay alive until it is complete.

    Args:
        under_way: The communicator's operations. They keep themselves alive there.
        handle: A native ckdist_operation.
        result: Returned by `wait`.
        used: Objects that must stay alive until then.
    """

    def __init__(self, under_way: "set[Operation[Any]]", handle: native.CData, result: Result, *used: object) -> None:
        self._under_way, self._handle, self._result = under_way, handle, result
        self._used = (result, *used)
        under_way.add(self)

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
        self._under_way.discard(self)
