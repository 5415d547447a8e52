"""Quantised matrices with codes and scales in separate tensors, as in safetensors: places of the scales, and values.

The runtime joins codes and scales to blocks when it packs (`native/runtime/joined_rows.h`). The numpy code here is the
reference definition of the values, for tools that need float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckdist.errors import ConfigError, ModelFileError
from ckdist.weights import dtypes
from ckdist.weights.tensor_source import Place

Read = Callable[[Place, int], np.ndarray]  # reads a number of bytes at a place

SYMMETRIC = 8  # zero point of 4-bit codes if none is stored
FORMS = {  # dtype of a tensor of scales -> `Scales.form`
    "F32": "f32", "F16": "f16", "BF16": "bf16", "U8": "exponent", "F8_E8M0": "exponent"
}  # fmt: skip
_ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "exponent": 1, "e4m3": 1}


def _e4m3_values() -> np.ndarray:
    """The 256 values of an 8-bit float with 4 exponent bits and 3 mantissa bits (OCP's E4M3)."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    magnitude[code & 127 == 127] = np.nan
    return np.where(code & 128, -magnitude, magnitude).astype(np.float32)


E4M3_VALUES = _e4m3_values()


@dataclass(frozen=True)
class Scales:
    """The scales of a matrix, or of each matrix of a stack: one per `rows_each` rows and `cols_each` columns."""

    # bytes: one for each column; nibbles: two columns in a byte, the first in its low half; columns, rows:
    # words of 32 bits across rows (`across.py`)
    codes: str
    form: str  # f32, f16, bf16; exponent: a byte for 2 ** (byte - 127); e4m3: 8-bit floats, times the matrix's factor
    rows_each: int
    cols_each: int
    shape: tuple[int, int]  # shape of one matrix's scales
    places: tuple[Place, ...]  # the scales of each matrix
    # Zero points of each matrix: 4 bits per scale, eight rows in an int32. Empty: 4-bit codes have the zero point 8.
    zeros: tuple[Place, ...] = ()
    first_row: int = 0  # row at which the matrix begins, if several matrices share a tensor of scales
    zero_added: int = 0  # added to each 32 bits of zero points
    # Column in the file of each column of the matrix, int32, if groups are no runs of columns in the file.
    order: bytes = b""
    factors: tuple[float, ...] = ()  # one for each matrix; only for e4m3

    @property
    def is_across(self) -> bool:
        """True if words of codes and zero points lie across rows, and scales are stored as (groups, rows)."""
        return self.codes in ("columns", "rows")

    def row_step(self, columns: int) -> int:
        """Bytes from a row to the next; 0 if codes lie across rows, so that the matrix has the tensor's offset."""
        return 0 if self.is_across else self.code_bytes(columns)

    def code_bytes(self, elements: int) -> int:
        """Bytes of `elements` codes."""
        return elements if self.codes == "bytes" else elements // 2

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one matrix's scales, without zero points."""
        return self.shape[0] * self.shape[1] * _ITEM_BYTES[self.form]

    @property
    def zero_bytes(self) -> int:
        """Bytes of one matrix's zero points."""
        return -(-self.shape[0] // 8) * self.shape[1] * 4 if self.zeros else 0

    def parts(self, matrix: int) -> list[tuple[Place, int]]:
        """(place, bytes) of a matrix's scales, and of its zero points if there are any."""
        found = [(self.places[matrix], self.matrix_bytes)]
        return [*found, (self.zeros[matrix], self.zero_bytes)] if self.zeros else found

    def values(
        self, place: Place, type_number: int, matrix: int, rows: tuple[int, int], columns: int, read: Read
    ) -> np.ndarray:
        """The float32 values (rows, columns) of rows [begin, end) of a matrix whose codes begin at `place`."""
        begin, end = rows
        at = self.first_row + np.arange(begin, end)
        if self.is_across:
            from ckdist.weights.across import across_values

            return across_values(self, place, matrix, at, columns, read)
        of_rows = at // self.rows_each
        first, last = int(of_rows[0]), int(of_rows[-1]) + 1
        row_bytes = self.shape[1] * _ITEM_BYTES[self.form]
        path, offset = self.places[matrix]
        stored = read((path, offset + first * row_bytes), (last - first) * row_bytes)
        scales = self.floats(stored).reshape(-1, self.shape[1])[of_rows - first]  # (rows, groups)
        if self.factors:
            scales = scales * np.float32(self.factors[matrix])
        zeros = np.full(scales.shape, SYMMETRIC, np.int32)
        if self.zeros:
            path, offset = self.zeros[matrix]
            word_bytes, first, last = 4 * self.shape[1], first // 8, (last + 7) // 8
            words = read((path, offset + first * word_bytes), (last - first) * word_bytes)
            words = words.view("<u4").reshape(-1, self.shape[1])[of_rows // 8 - first]
            zeros = (words >> (4 * (of_rows % 8)).astype(np.uint32)[:, None] & 15).astype(np.int32)
        path, offset = place
        is_fp4 = type_number in (dtypes.MXFP4.number, dtypes.NVFP4.number)
        row_bytes = self.code_bytes(columns)
        codes = read((path, offset + begin * row_bytes), (end - begin) * row_bytes).reshape(end - begin, row_bytes)
        if self.codes == "bytes":
            plain = E4M3_VALUES[codes]
        else:
            pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
            plain = FP4_VALUES[pairs] if is_fp4 else pairs.astype(np.float32)
        groups = self.groups(columns)
        if self.codes == "nibbles" and not is_fp4:
            plain = plain - zeros[:, groups].astype(np.float32)
        with np.errstate(over="ignore"):  # a damaged scale may overflow to inf
            return scales[:, groups] * plain

    def plan(
        self, name: str, chosen: range, places: Callable[[Sequence[Place]], tuple[np.ndarray, np.ndarray]], columns: int
    ) -> dict[str, Any]:
        """The fields of the native `struct ckdist_scales` of the matrices `chosen` of the weight `name`.

        Args:
            places: Numbers of files and offsets of places.
            columns: Columns that this rank has.

        Raises ConfigError if these are not all columns, and columns have an order of their own.
        """
        if self.order and columns < len(self.order) // 4:
            raise ConfigError(
                f"{name} has columns in an order of its own (desc_act), which cannot be sharded: "
                "use -pp with a stage for each rank, or the model without desc_act"
            )
        files, offsets = places([self.places[index] for index in chosen])
        zero_files, zero_offsets = places([self.zeros[index] for index in chosen if self.zeros])
        return {
            "codes": self.codes, "form": self.form, "rows_each": self.rows_each, "cols_each": self.cols_each,
            "rows": self.shape[0], "cols": self.shape[1], "first_row": self.first_row,
            "files": files, "offsets": offsets,
            "zero_files": zero_files if self.zeros else None, "zero_offsets": zero_offsets,
            "zero_added": self.zero_added, "order_count": len(self.order) // 4,
            "order": np.frombuffer(self.order, np.int32) if self.order else None,
            "factors": np.array([self.factors[i] for i in chosen], np.float32) if self.factors else None,
        }  # fmt: skip

    def groups(self, columns: int) -> np.ndarray:
        """The group of each column in the file."""
        groups = np.arange(columns) // self.cols_each
        if self.order:
            groups[np.frombuffer(self.order, np.int32)] = groups.copy()
        return groups

    def floats(self, data: np.ndarray) -> np.ndarray:
        """Converts the bytes of scales to float32."""
        if self.form == "f32":
            return data.view("<f4")
        if self.form == "f16":
            return data.view("<f2").astype(np.float32)
        if self.form == "e4m3":
            return E4M3_VALUES[data]
        if self.form == "bf16":
            return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        return np.ldexp(np.float32(1), data.astype(np.int32) - 127)


FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # E2M1


def stacked_scales(scales: Sequence[Scales | None], where: str) -> Scales | None:
    """Joins the scales of single matrices to those of a stack; None if they have no scales.

    Raises ModelFileError, which begins with `where`, if their forms differ.
    """
    first = scales[0]
    if first is None:
        return None
    places, zeros, factors = [], [], []
    for index, one in enumerate(scales):
        if one is not None and one.order:
            raise ModelFileError(
                f"{where}: matrix {index} has columns in an order of its own (desc_act), which experts cannot have: "
                "take the model without desc_act, or a GGUF file of it"
            )
        if (
            one is None
            or replace(one, places=first.places, zeros=first.zeros, factors=first.factors) != first
            or bool(one.zeros) != bool(first.zeros)
        ):
            raise ModelFileError(f"{where}: the scales of matrix {index} are of another form than those of the first")
        places += one.places
        zeros += one.zeros
        factors += one.factors
    return replace(first, places=tuple(places), zeros=tuple(zeros), factors=tuple(factors))
