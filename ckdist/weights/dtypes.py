"""The tensor types of GGUF (ggml_type): numbers, names, and the size of one block.

The native table in core/dtype.h is the same.
"""

from typing import NamedTuple

from ckdist.errors import ModelFileError


class TensorType(NamedTuple):
    """One storage type: `block_elements` consecutive elements of a row take `block_bytes` bytes."""

    number: int
    name: str
    block_elements: int
    block_bytes: int

    def row_bytes(self, elements: int) -> int:
        """Bytes of `elements` consecutive elements, a multiple of the block."""
        return elements // self.block_elements * self.block_bytes


F32 = TensorType(0, "F32", 1, 4)
F16 = TensorType(1, "F16", 1, 2)
Q4_0 = TensorType(2, "Q4_0", 32, 18)
Q4_1 = TensorType(3, "Q4_1", 32, 20)
Q5_0 = TensorType(6, "Q5_0", 32, 22)
Q5_1 = TensorType(7, "Q5_1", 32, 24)
Q8_0 = TensorType(8, "Q8_0", 32, 34)
Q2_K = TensorType(10, "Q2_K", 256, 84)
Q3_K = TensorType(11, "Q3_K", 256, 110)
Q4_K = TensorType(12, "Q4_K", 256, 144)
Q5_K = TensorType(13, "Q5_K", 256, 176)
Q6_K = TensorType(14, "Q6_K", 256, 210)
IQ2_XXS = TensorType(16, "IQ2_XXS", 256, 66)
IQ2_XS = TensorType(17, "IQ2_XS", 256, 74)
IQ3_XXS = TensorType(18, "IQ3_XXS", 256, 98)
IQ1_S = TensorType(19, "IQ1_S", 256, 50)
IQ4_NL = TensorType(20, "IQ4_NL", 32, 18)
IQ3_S = TensorType(21, "IQ3_S", 256, 110)
IQ2_S = TensorType(22, "IQ2_S", 256, 82)
IQ4_XS = TensorType(23, "IQ4_XS", 256, 136)
IQ1_M = TensorType(29, "IQ1_M", 256, 56)
BF16 = TensorType(30, "BF16", 1, 2)
TQ1_0 = TensorType(34, "TQ1_0", 256, 54)
TQ2_0 = TensorType(35, "TQ2_0", 256, 66)
MXFP4 = TensorType(39, "MXFP4", 32, 17)

GRIDS = (IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S)  # types whose codes index a grid
KNOWN = (
    F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, *GRIDS, IQ4_NL, IQ4_XS, MXFP4,
    TQ1_0, TQ2_0,
)  # fmt: skip
BY_NUMBER = {t.number: t for t in KNOWN}
FLOATS = (F32, F16, BF16)

# Types that GGUF numbers and this project does not compute on, for the error message alone.
_OTHER_NAMES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4"}


def of_number(number: int, where: str) -> TensorType:
    """The type with GGUF's `number`; ModelFileError, beginning with `where`, names it and the known ones."""
    known = BY_NUMBER.get(number)
    if known is None:
        name = _OTHER_NAMES.get(number, "unknown")
        raise ModelFileError(
            f"{where} has type {number} ({name}); the known types are {', '.join(t.name for t in KNOWN)}"
        )
    return known
