"""Where one weight lies in a model's files, and how what is stored becomes what its name means."""

import math
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ckdist.layout import Range
from ckdist.weights import dtypes
from ckdist.weights.scales import Place, Scales


@dataclass(frozen=True)
class HeadPart:
    """Of each head's `stored` rows those from `first` on, `rows` of them; `transposed`: these are the weight's columns.

    The tensor has rows of `columns`. Transposed, row c of head h has the elements
    [h * stored + first + j][c * every + lane]. Of a stack so of each of its matrices.
    """

    stored: int
    first: int
    rows: int
    columns: int
    transposed: bool = False
    every: int = 1
    lane: int = 0

    @property
    def head_rows(self) -> int:
        """Of the weight, that come of one head."""
        return self.columns // self.every if self.transposed else self.rows


@dataclass(frozen=True)
class TensorSource:
    """Where one weight lies and how what is stored becomes what Hugging Face means by its name."""

    name: str
    type: int  # ggml number
    shape: tuple[int, ...]  # (out, in), (n,), or of a stack (matrices, out, in)
    file: pathlib.Path
    offset: int  # bytes from the start of the file
    head_rows: int = 0  # > 0: the halves of each head of this many rows are stored interleaved
    plus_one: bool = False  # the weight is one more than what is stored
    minus_exp: bool = False  # minus the exponential of the weight is stored
    matrices: tuple[Place, ...] = ()  # of a stack: the file and the offset of each matrix
    part: HeadPart | None = None  # of a tensor whose heads' rows belong to several weights
    scales: Scales | None = None  # of codes alone, of which blocks of the type are made

    @property
    def files(self) -> set[pathlib.Path]:
        """All files that the weight is in."""
        beside = (*self.scales.places, *self.scales.zeros) if self.scales else ()
        return {path for path, _ in (*self.places, *beside)}

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        elements = int(np.prod(self.stored_shape, dtype=np.int64))
        if self.scales is None:
            return dtypes.BY_NUMBER[self.type].row_bytes(elements)
        scales = len(self.scales.places) * (self.scales.matrix_bytes + self.scales.zero_bytes)
        return self.scales.code_bytes(elements) + scales

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of what lies at the offset: the whole tensor, where the weight is a part of its heads."""
        if self.part is None:
            return self.shape
        rows = self.shape[0 if len(self.shape) < 3 else 1]
        return *self.shape[:-2], rows // self.part.head_rows * self.part.stored, self.part.columns

    @property
    def places(self) -> tuple[tuple[pathlib.Path, int], ...]:
        """The file and the offset in it, of each matrix of a stack."""
        return self.matrices or ((self.file, self.offset),)

    def byte_ranges(
        self, rows: Sequence[Range], matrices: Sequence[int] = (0,)
    ) -> Iterator[tuple[pathlib.Path, Range]]:
        """File and bytes [begin, end) of what these rows of these matrices are made of, or these elements of a vector.

        Whole heads where their rows stand in another order, all rows where they belong to several weights, and all
        scales.
        """
        stored = self.stored_shape
        count, columns = stored[len(stored) > 2], math.prod(stored[1 + (len(stored) > 2) :])
        row_bytes = self.scales.code_bytes(columns) if self.scales else dtypes.BY_NUMBER[self.type].row_bytes(columns)
        heads = self.head_rows or 1
        ranges = [(begin // heads * heads, -(-end // heads) * heads) for begin, end in rows if begin < end]
        for matrix in matrices:
            path, offset = self.places[matrix]
            for begin, end in [(0, count)] if self.part else ranges:
                yield path, (offset + begin * row_bytes, offset + end * row_bytes)
            for (path, offset), size in self.scales.parts(matrix) if self.scales else ():
                yield path, (offset, offset + size)

    @property
    def row_order(self) -> np.ndarray | None:
        """int32 (rows,): the stored row of each row; None where they are the same.

        Row j of the first half of head h is stored at h * head_rows + 2 j, of the second half right behind it.
        """
        if not self.head_rows:
            return None
        rows = np.arange(self.shape[0], dtype=np.int32)
        head, half, j = (
            rows // self.head_rows,
            rows % self.head_rows // (self.head_rows // 2),
            rows % (self.head_rows // 2),
        )
        return head * self.head_rows + 2 * j + half
