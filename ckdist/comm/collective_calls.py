"""The collectives of a communicator, each written once for calls that block and for calls that only start."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from ckdist import native
from ckdist.errors import ConfigError
from ckdist.native import CData

ELEMENTS = native.numbers("ckdist_element", "ckdist_element_")
OPERATIONS = native.numbers("ckdist_reduction", "ckdist_reduction_")

NativeCall = Callable[[CData], int]  # its argument receives the ckdist_operation; NULL: the call blocks
Array = TypeVar("Array")
Nothing = TypeVar("Nothing")

lib = native.lib


class Collectives(Generic[Array, Nothing]):
    """Collective calls. All ranks make the same ones in the same order.

    `Array` and `Nothing` are np.ndarray and None if the calls block, else Operations with these results.
    """

    rank: int
    size: int
    handle: CData  # the native communicator; None once closed

    def _run(self, call: NativeCall, result: np.ndarray | None, *used: np.ndarray) -> Any:
        """Makes a call. `used`: other arrays that must live until it is complete."""
        raise NotImplementedError

    def all_reduce(
        self, x: np.ndarray, op: str = "sum", out: np.ndarray | None = None, dtype: str | None = None
    ) -> Array:
        """The sum (max, min) of all ranks' x, on every rank. `out` may be x."""
        out = np.empty_like(x) if out is None else out
        check_array(out, x.size, x.dtype, "out")
        return self._run(
            lambda o: lib.ckdist_all_reduce(
                self.handle, native.pointer(x), native.pointer(out), x.size, _element(x, dtype), _operation(op), o
            ),
            out,
            x,
        )

    def reduce_scatter(
        self,
        x: np.ndarray,
        counts: Sequence[int] | None = None,
        op: str = "sum",
        out: np.ndarray | None = None,
        dtype: str | None = None,
    ) -> Array:
        """This rank's part, counts[rank] elements, of the result of `all_reduce`; equal parts by default."""
        counts = self._counts(counts, x.size)
        out = np.empty(counts[self.rank], x.dtype) if out is None else out
        check_array(out, counts[self.rank], x.dtype, "out")
        return self._run(
            lambda o: lib.ckdist_reduce_scatter(
                self.handle, native.pointer(x), native.pointer(out), counts, _element(x, dtype), _operation(op), o
            ),
            out,
            x,
        )

    def all_gather(self, x: np.ndarray, counts: Sequence[int] | None = None, out: np.ndarray | None = None) -> Array:
        """All ranks' x in rank order. Rank r has counts[r] elements (default: x.size on every rank)."""
        parts = [x.size] * self.size if counts is None else self._counts(counts, sum(counts))
        check_array(x, parts[self.rank], x.dtype, "x")
        out = np.empty(sum(parts), x.dtype) if out is None else out
        check_array(out, sum(parts), x.dtype, "out")
        return self._run(
            lambda o: lib.ckdist_all_gather(self.handle, native.pointer(x), native.pointer(out), _bytes(parts, x), o),
            out,
            x,
        )

    def all_to_all(
        self,
        x: np.ndarray,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        out: np.ndarray | None = None,
    ) -> Array:
        """Sends the r-th part of x, send_counts[r] elements, to rank r and returns the received parts in rank order.

        `recv_counts` defaults to `send_counts`, and that to equal parts.
        """
        send = self._counts(send_counts, x.size)
        receive = send if recv_counts is None else self._counts(recv_counts, sum(recv_counts))
        if send[self.rank] != receive[self.rank]:
            raise ConfigError(
                f"rank {self.rank} sends itself {send[self.rank]} elements and receives {receive[self.rank]}"
            )
        out = np.empty(sum(receive), x.dtype) if out is None else out
        check_array(out, sum(receive), x.dtype, "out")
        return self._run(
            lambda o: lib.ckdist_all_to_all(
                self.handle, native.pointer(x), _bytes(send, x), native.pointer(out), _bytes(receive, x), o
            ),
            out,
            x,
        )

    def broadcast(self, x: np.ndarray, root: int = 0) -> Array:
        """Overwrites x on every rank with the root's x, and returns it."""
        check_array(x, x.size, x.dtype, "x")
        return self._run(lambda o: lib.ckdist_broadcast(self.handle, native.pointer(x), x.nbytes, root, o), x)

    def barrier(self) -> Nothing:
        """Completes when every rank has called it."""
        return self._run(lambda o: lib.ckdist_barrier(self.handle, o), None)

    def _counts(self, counts: Sequence[int] | None, total: int) -> list[int]:
        """`counts`, or equal parts of `total`. Raises ConfigError if they are not one per rank with this sum."""
        if counts is None:
            if total % self.size:
                raise ConfigError(f"{total} elements cannot be sharded evenly over {self.size} ranks: give counts")
            return [total // self.size] * self.size
        counts = [int(n) for n in counts]
        if len(counts) != self.size or min(counts) < 0 or sum(counts) != total:
            raise ConfigError(f"counts {counts} must be {self.size} numbers, none negative, and {total} in all")
        return counts


def check_array(array: np.ndarray, size: int, dtype: np.dtype[Any], name: str) -> None:
    """Raises ConfigError unless `array` is contiguous and has this size and type; `out` must be writable too."""
    if (
        array.size != size
        or array.dtype != dtype
        or not array.flags.c_contiguous
        or (not array.flags.writeable and name == "out")
    ):
        raise ConfigError(f"{name} must be a contiguous array of {size} {dtype}, not of {array.size} {array.dtype}")


def _element(array: np.ndarray, dtype: str | None) -> int:
    """The native number of an element type. Raises ConfigError if the array cannot be exchanged as `dtype`."""
    name = dtype or array.dtype.name
    if name not in ELEMENTS:
        raise ConfigError(f"arrays of {name} cannot be exchanged; use one of {', '.join(ELEMENTS)}")
    if name == "bfloat16" and array.dtype.itemsize != 2:
        raise ConfigError(f"bfloat16 travels in arrays of uint16, not of {array.dtype.name}")
    if name not in ("bfloat16", array.dtype.name):
        raise ConfigError(f"an array of {array.dtype.name} was called {name}")
    return ELEMENTS[name]


def _operation(op: str) -> int:
    if op not in OPERATIONS:
        raise ConfigError(f"{op!r} is not a reduction; use one of {', '.join(OPERATIONS)}")
    return OPERATIONS[op]


def _bytes(counts: list[int], x: np.ndarray) -> list[int]:
    return [n * x.itemsize for n in counts]
