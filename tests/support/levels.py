"""The levels of instructions that kernels are tested on: those of this build that this CPU has.

`tests/kernels/test_levels.py` skips each level that the CPU lacks, once and with the reason.
"""

from ckdist import native

ALL = dict(reversed(native.isas().items()))  # plainest first; with what the CPU lacks
HERE = [name for name, lacks in ALL.items() if not lacks]
# Whose code is shared by the levels above them, where a file asks for no more.
VECTORS = ("baseline", "avx2", "avx512", "neon")
# Of kernels that ask for dot products of integers alone, and for conversions to bfloat16 alone.
INTEGERS = (*VECTORS, "avx2_vnni", "avx512_vnni", "amx", "neon_dotprod", "neon_i8mm")
BF16 = (*VECTORS, "avx512_bf16", "neon_bf16")


def each(names=tuple(ALL)) -> list[str]:
    """Those of `names` that this build and this CPU have."""
    return [name for name in HERE if name in names]
