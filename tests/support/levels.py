"""The levels of instructions that kernels are tested on; those that the CPU lacks are skipped, and told at the end."""

import pytest

from ckdist import native

ALL = dict(reversed(native.isas().items()))  # plainest first; with what the CPU lacks
HERE = [name for name, lacks in ALL.items() if not lacks]
# Whose code is shared by the levels above them, where a file asks for no more.
VECTORS = ("baseline", "avx2", "avx512", "neon")
# Of kernels that ask for dot products of integers alone, and for conversions to bfloat16 alone.
INTEGERS = (*VECTORS, "avx2_vnni", "avx512_vnni", "amx", "neon_dotprod", "neon_i8mm")
BF16 = (*VECTORS, "avx512_bf16", "neon_bf16")


def each(names=tuple(ALL)) -> list:
    """Parameters for those of `names` that this build has; tests of levels that the CPU lacks are skipped, and told."""
    marks = {
        name: pytest.mark.skipif(bool(lacks), reason=f"level {name}: this CPU lacks {lacks}")
        for name, lacks in ALL.items()
    }
    return [pytest.param(name, marks=mark) for name, mark in marks.items() if name in names]
