"""Measures the rate of multiplications and additions of this process's threads."""

from collections.abc import Sequence

from ckdist import native

ARITHMETIC = {0: "fma", 1: "bf16", 2: "int8"}  # activation format -> arithmetic of its products
ARITHMETIC_SECONDS = 0.03
REPEATS = 5


def arithmetic_rate(threads: int, cpus: Sequence[int], form: int, isa: str | None = None) -> float:
    """Operations per second of threads of this process. A multiplication and its addition are two operations.

    Args:
        threads: Number of threads.
        cpus: CPUs to pin the threads to, one each. Fewer CPUs than threads: no pinning.
        form: Activation format, a key of ARITHMETIC.
        isa: Instruction set level. None: the selected one.
    """
    pins = cpus if len(cpus) >= threads else None
    rate = native.lib.ckdist_arithmetic_rate
    return native.call(rate, isa, threads, pins, form, ARITHMETIC_SECONDS, REPEATS)
