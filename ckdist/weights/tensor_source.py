"""The place of a weight in a model's files, and the conversion from the stored values to the weight."""

import math
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckdist.layout import Range
from ckdist.weights import dtypes

if TYPE_CHECKING:  # few files have scales apart from their codes
    from ckdist.weights.scales import Scales

Place = tuple[pathlib.Path, int]  # a file and the offset in it


@dataclass(frozen=True)
class HeadPart:
    """A weight that is a part of each head's rows in a tensor, or in each matrix of a stack.

    The weight has rows [first, first + rows) of the `stored` rows of each head. If `transposed`, row c of head h of the
    weight has the elements tensor[h * stored + first + j][column], for j < rows, where column is
    (c // width * every + lane) * width + c % width.
    """

    stored: int
    first: int
    rows: int
    columns: int  # columns of the tensor
    transposed: bool = False
    every: int = 1
    lane: int = 0
    width: int = 1

    @property
    def head_rows(self) -> int:
        """Rows of the weight per head."""
        return self.columns // self.every if self.transposed else self.rows


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. It holds one or more weights: each has some of its rows, in each matrix of a stack."""

    name: str
    type: int  # ggml number; -1 if weights cannot have the type
    shape: tuple[int, ...]  # row-major, the contiguous dimension last
    file: pathlib.Path
    offset: int  # bytes from the start of the file
    dtype: str  # the file's name of the type
    nbytes: int
    scales: "Scales | None" = None  # as in TensorSource

    @property
    def source(self) -> "TensorSource":
        """The tensor as a weight of its own."""
        return TensorSource(self.name, self.type, self.shape, self.file, self.offset)


@dataclass(frozen=True)
class TensorSource:
    """The place of one weight, and the conversion to the weight that Hugging Face's name means."""

    name: str
    type: int  # ggml number
    shape: tuple[int, ...]  # (out, in), (n,), or (matrices, out, in) for a stack
    file: pathlib.Path
    offset: int  # bytes from the start of the file
    head_rows: int = 0  # if not 0: rows of a head; the two halves of each head are stored interleaved
    plus_one: bool = False  # weight = stored + 1
    exp_sign: int = 0  # 1, -1: weight = log(exp_sign * stored)
    factor: float = 1.0  # weight = factor * stored
    matrices: tuple[Place, ...] = ()  # for a stack: the file and offset of each matrix
    part: HeadPart | None = None  # if the tensor has rows of several weights for each head
    scales: "Scales | None" = None  # if codes and scales are stored apart; the loader joins them to blocks of the type

    @property
    def files(self) -> set[pathlib.Path]:
        """All files that contain parts of the weight."""
        scales = (*self.scales.places, *self.scales.zeros) if self.scales else ()
        return {path for path, _ in (*self.places, *scales)}

    @property
    def nbytes(self) -> int:
        """Bytes of the weight in the files."""
        elements = math.prod(self.stored_shape)
        if self.scales is None:
            return dtypes.BY_NUMBER[self.type].row_bytes(elements)
        scales = len(self.scales.places) * (self.scales.matrix_bytes + self.scales.zero_bytes)
        return self.scales.code_bytes(elements) + scales

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the tensor at the offset. It has more rows than the weight if that is a part of its heads."""
        if self.part is None:
            return self.shape
        rows = self.shape[0 if len(self.shape) < 3 else 1]
        return *self.shape[:-2], rows // self.part.head_rows * self.part.stored, self.part.columns

    @property
    def places(self) -> tuple[tuple[pathlib.Path, int], ...]:
        """The file and offset of each matrix of a stack, or of the whole weight."""
        return self.matrices or ((self.file, self.offset),)

    def byte_ranges(
        self, rows: Sequence[Range], matrices: Sequence[int] = (0,)
    ) -> Iterator[tuple[pathlib.Path, Range]]:
        """The files and bytes [begin, end) that these rows of these matrices, or elements of a vector, are read from.

        They cover whole heads if rows are interleaved, all rows if the tensor has several weights, and all scales.
        """
        stored = self.stored_shape
        count, columns = stored[len(stored) > 2], math.prod(stored[1 + (len(stored) > 2) :])
        row_bytes = self.scales.code_bytes(columns) if self.scales else dtypes.BY_NUMBER[self.type].row_bytes(columns)
        heads = self.head_rows or 1
        ranges = [(begin // heads * heads, -(-end // heads) * heads) for begin, end in rows if begin < end]
        for matrix in matrices:
            path, offset = self.places[matrix]
            if self.scales and self.scales.is_across:
                ranges = [(0, self.scales.shape[0])]
            for begin, end in [(0, count)] if self.part else ranges:
                yield path, (offset + begin * row_bytes, offset + end * row_bytes)
            for (path, offset), size in self.scales.parts(matrix) if self.scales else ():
                yield path, (offset, offset + size)

    @property
    def row_order(self) -> np.ndarray | None:
        """The stored row of each row, int32 (rows,); None if rows are not interleaved.

        Row j of the first half of head h is stored at h * head_rows + 2 j. Row j of the second half follows it.
        """
        if not self.head_rows:
            return None
        rows = np.arange(self.shape[0], dtype=np.int32)
        half_rows = self.head_rows // 2
        half, j = rows % self.head_rows // half_rows, rows % half_rows
        return rows // self.head_rows * self.head_rows + 2 * j + half
