"""Predicts read rates of a step if a part of its weights is still in the last-level cache from an earlier step.

A machine file has rates for models whose steps all read the same bytes: the more bytes, the fewer are still in the
cache at the next step. Replacement in such caches is nearly random, so only the number of bytes read between two uses
matters: after n other bytes, a byte is still in a cache of C bytes with probability exp(-n / C).

Bytes that each step reads are used again after one step. An expert is used again after a random number of steps, and
its bytes evict bytes that each step reads. So a step of a mixture is priced like a step of a larger dense model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

MOST_STEPS = 512  # largest distinguished number of steps between two uses of an expert
LEAST_SHARE = 1e-3  # smaller fractions of an expert's uses are added to the last one
SIZES = 256  # points of interpolation over bytes per step, on a logarithmic scale
LEAST_BYTES, MOST_BYTES = 1e3, 1e18  # range of these points
BEYOND = 1.001  # factor on the reach beyond which nothing is in the cache
HALVINGS = 40


@dataclass(frozen=True)
class BytesRead:
    """The bytes that a rank's step reads."""

    always: float  # bytes that each step reads
    stacks: Mapping[float, float] = field(default_factory=dict)  # fraction of experts that a token uses -> all bytes


@dataclass(frozen=True)
class ReadRates:
    """Read rates in bytes per second."""

    always: float  # for bytes that each step reads
    stacks: Mapping[float, float] = field(default_factory=dict)  # fraction of experts that a token uses -> rate

    def of(self, used: float | None) -> float:
        """The rate for a stack; None: for bytes that each step reads."""
        return self.always if used is None else self.stacks[used]


def read_rates(
    read: BytesRead, hit: Callable[[float, int], float], rate: Callable[[float], float], reach: float
) -> ReadRates:
    """The read rates of a step in a series of equal steps.

    Args:
        read: The bytes that the step reads.
        hit: hit(used, steps): fraction of a stack that `steps` steps use.
        rate: rate(bytes): bytes per second of a model whose steps all read the same `bytes`.
        reach: Bytes per step beyond which nothing is in the cache.
    """
    near, far = 1 / rate(0.0), 1 / rate(2 * reach)  # seconds per byte: from the cache, from memory
    if not read.stacks or far <= near:
        return ReadRates(rate(read.always), dict.fromkeys(read.stacks, rate(2 * reach)))
    sizes = np.geomspace(min(LEAST_BYTES, reach), reach, SIZES)
    missed = np.array([(1 / rate(size) - near) / (far - near) for size in sizes])
    sizes = np.append(sizes, [reach * BEYOND, MOST_BYTES])
    missed = np.append(missed, [1.0, 1.0])  # fraction of a step's bytes that comes from memory
    came = sizes * missed
    parts = {used: _comes_again(used, hit) for used in read.stacks}

    def misses(size: float, used: float) -> tuple[float, float]:
        """(a, a / b) for a step that is like that of a dense model of `size` bytes.

        a: fraction of the stack's bytes that comes from memory. b: the same for bytes that each step reads.
        """
        steps, shares = parts[used]
        once = float(np.interp(size, sizes, came))
        part, one = float(shares @ np.interp(steps * once, came, missed)), float(np.interp(once, came, missed))
        return part, float(shares @ steps) if one <= 0 else part / one

    def equivalent(size: float) -> float:
        """Bytes of the equivalent dense model, if `size` is assumed for it. The solution is a fixed point."""
        stacks = ((total * hit(used, 1), used) for used, total in read.stacks.items())
        return read.always + sum(taken * misses(size, used)[1] for taken, used in stacks)

    low, high = 0.0, equivalent(0.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if equivalent(middle) > middle else (low, middle)
    one = float(np.interp(np.interp(high, sizes, came), came, missed))
    reads = lambda part: 1 / (near + (far - near) * part)
    return ReadRates(reads(one), {used: reads(misses(high, used)[0]) for used in read.stacks})


def _comes_again(used: float, hit: Callable[[float, int], float]) -> tuple[np.ndarray, np.ndarray]:
    """(numbers of steps, fractions): the fraction of a step's experts that is used again after each number of steps.

    The last fraction includes all later uses. If n steps use H(n) experts, the n-th step adds H(n) - H(n - 1) that the
    steps before it did not use (Denning and Schwartz 1972, "Properties of the working-set model").
    """
    once, shares, new = hit(used, 1), [], 1.0
    for steps in range(1, MOST_STEPS):
        later = max(0.0, (hit(used, steps + 1) - hit(used, steps)) / once)
        if later < LEAST_SHARE:
            break
        shares.append(new - later)
        new = later
    shares.append(new)
    return np.arange(1.0, len(shares) + 1), np.array(shares)


__all__ = ["BytesRead", "ReadRates", "read_rates"]
