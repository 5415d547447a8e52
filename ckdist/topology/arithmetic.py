"""How fast threads of this process multiply and add, by code that does nothing else."""

from collections.abc import Sequence

from ckdist import native

ARITHMETIC = {0: "fma", 1: "bf16", 2: "int8"}  # by activation format: what products with it are made of
ARITHMETIC_SECONDS = 0.03
REPEATS = 5


def arithmetic_rate(threads: int, cpus: Sequence[int], form: int, isa: str | None = None) -> float:
    """Operations per second of `threads` threads of this process; one multiplication and its addition are two.

    `cpus`: one for each thread, or fewer where none is pinned. `form`: the activation format, a key of ARITHMETIC.
    `isa`: None for the level chosen at load.
    """
    pins = native.ffi.new("int32_t[]", list(cpus)) if len(cpus) >= threads else native.ffi.NULL
    out = native.ffi.new("double *")
    level = native.ffi.NULL if isa is None else isa.encode()
    native.check(native.lib.ckdist_arithmetic_rate(level, threads, pins, form, ARITHMETIC_SECONDS, REPEATS, out))
    return out[0]
