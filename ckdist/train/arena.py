"""Named arrays in one block of memory: the optimizer and the reduction of gradients make one pass over it."""

import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ckdist.program.lowered import ALIGNMENT
from ckdist.program.program import Weight
from ckdist.weights.safetensors_writer import as_stored

WIDE, NARROW = np.dtype(np.float32), np.dtype(np.uint16)  # of arrays of float32, and of bfloat16


def shape_of(weight: Weight) -> tuple[int, ...]:
    """The shape of a weight whose dimensions are all known."""
    return tuple(d.elements for d in weight.dims)


def widened(values: np.ndarray) -> np.ndarray:
    """The values as floats, if they are bfloat16; else the array itself."""
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == NARROW else values


def assign(to: np.ndarray, values: np.ndarray) -> None:
    """Copies values to an array of either type. Floats are rounded to the nearest bfloat16."""
    to[...] = as_stored(values, "BF16") if to.dtype == NARROW and values.dtype != NARROW else values


class Arena(Mapping[str, np.ndarray]):
    """`flat` is float32 or bfloat16 (elements,); `arena[name]` is a view of it. Padding between arrays stays zero.

    Args:
        shapes: Name -> shape of each array.
        flat: Memory of the right size. Default: new zeros.
        dtype: The type of new zeros.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        flat: np.ndarray | None = None,
        dtype: np.dtype[Any] = WIDE,
    ) -> None:
        self.shapes, self.places = dict(shapes), self.places_of(shapes)
        at = self.size(self.shapes.values())
        self.flat = np.zeros(at, dtype) if flat is None else flat
        assert self.flat.shape == (at,) and self.flat.dtype in (WIDE, NARROW)
        self._views = {
            name: self.flat[begin:end].reshape(self.shapes[name]) for name, (begin, end) in self.places.items()
        }

    @classmethod
    def in_file(cls, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype[Any], folder: Path) -> "Arena":
        """An arena of zeros in a file without a name, which memory need not hold. Raises OSError."""
        size = dtype.itemsize * cls.size(shapes.values())
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here
            mapped = mmap.mmap(file.fileno(), size)
        return cls(shapes, np.frombuffer(mapped, dtype))

    @classmethod
    def places_of(cls, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
        """The range [begin, end) in `flat` of each array."""
        places, at = {}, 0
        for name, shape in shapes.items():
            places[name] = at, at + math.prod(shape)
            at += cls.size([shape])
        return places

    @staticmethod
    def size(shapes: Iterable[tuple[int, ...]]) -> int:
        """Elements of an arena with arrays of these shapes."""
        return sum(-(-math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in shapes)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)
