"""The storage types of matrices, from the native table: number, name, and size of a block.

Numbers are those of GGUF (ggml_type). Numbers from `lib.ckdist_own_types` on are types of safetensors files, which
store codes and scales in two tensors; a block has both.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ckdist.errors import ModelFileError
from ckdist.native import ffi, lib


class TensorType(NamedTuple):
    """One storage type: `block_elements` consecutive elements of a row take `block_bytes` bytes."""

    number: int
    name: str
    block_elements: int
    block_bytes: int

    def row_bytes(self, elements: int) -> int:
        """Bytes of `elements` consecutive elements. `elements` must be a multiple of the block."""
        return elements // self.block_elements * self.block_bytes


def _known() -> Iterator[TensorType]:
    """The types of the native table (core/dtype.h). The kernels support these."""
    for number in range(lib.ckdist_type_count):
        if elements := lib.ckdist_type_block_elements(number):
            name = ffi.string(lib.ckdist_type_name(number)).decode()
            yield TensorType(number, name, elements, lib.ckdist_type_block_bytes(number))


KNOWN = tuple(_known())
BY_NUMBER = {t.number: t for t in KNOWN}
BY_NAME = {t.name: t for t in KNOWN}
F32, F16, BF16, Q4_0, Q8_0, Q4_K, MXFP4 = (
    BY_NAME[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "MXFP4")
)
F8_E4M3, INT4_32, INT4_32Z, INT4_128Z, NVFP4, F8_E4M3_32 = KNOWN[-6:]  # as in core/dtype.h
FLOATS = (F32, F16, BF16)
FLOAT_NUMBERS = {t.name: t.number for t in FLOATS}
I32 = TensorType(26, "I32", 1, 4)  # of tables that are no weights

# GGUF types that are not supported, for the error message.
_OTHER_NAMES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 27: "I64", 28: "F64", 40: "NVFP4"}


def of_number(number: int, where: str) -> TensorType:
    """The type with GGUF's `number`. Raises ModelFileError, which begins with `where`, if it is not supported."""
    known = I32 if number == I32.number else BY_NUMBER.get(number) if number < lib.ckdist_own_types else None
    if known is None:
        name = _OTHER_NAMES.get(number, "unknown")
        names = ", ".join(t.name for t in KNOWN if t.number < lib.ckdist_own_types)
        raise ModelFileError(f"{where} has type {number} ({name}); the known types are {names}")
    return known
