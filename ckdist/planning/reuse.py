"""How fast a step reads its weights and caches where some of them lie in the last-level cache since an earlier step.

What a machine file has is of models whose steps read the same bytes each: the more these are, the fewer are still there
when they come again. Which bytes give way to those that come is about random in such caches, so that it depends on how
many came since, and not on which of them were used last: of n bytes that come, those of a cache of C stay with a chance
of exp(-n / C). What each step reads comes again after one step; an expert after as many as chance has it, and what
comes for it sends away what each step reads. So the step of a mixture is like that of a model of more bytes than its
own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

MOST_STEPS = 512  # between two uses of an expert that are told apart
LEAST_SHARE = 1e-3  # of an expert's uses: so few later ones count as the last
SIZES = 256  # of bytes that steps read, on a scale of logarithms, between which lines are drawn
LEAST_BYTES, MOST_BYTES = 1e3, 1e18  # of these
BEYOND = 1.001  # times the most of which something stays: nothing does
HALVINGS = 40


@dataclass(frozen=True)
class BytesRead:
    """What a rank's step reads: bytes that each step reads, and of the stacks of experts all bytes, by the part of
    them that a token takes.
    """

    always: float
    stacks: Mapping[float, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadRates:
    """Bytes per second: of what each step reads, and of the stacks by the part of them that a token takes."""

    always: float
    stacks: Mapping[float, float] = field(default_factory=dict)

    def of(self, used: float | None) -> float:
        """Of a stack; None: of what each step reads."""
        return self.always if used is None else self.stacks[used]


def read_rates(
    read: BytesRead, hit: Callable[[float, int], float], rate: Callable[[float], float], reach: float
) -> ReadRates:
    """The rates at which a step like those before it reads.

    `hit(used, steps)`: the part of a stack that so many steps touch; `rate(bytes)`: bytes per second of a model whose
    steps read so many, the same each; beyond `reach` all rates are that of memory.
    """
    near, far = 1 / rate(0.0), 1 / rate(2 * reach)  # seconds of a byte, from the cache and from memory
    if not read.stacks or far <= near:
        return ReadRates(rate(read.always), dict.fromkeys(read.stacks, rate(2 * reach)))
    sizes = np.geomspace(min(LEAST_BYTES, reach), reach, SIZES)
    missed = np.array([(1 / rate(size) - near) / (far - near) for size in sizes])
    sizes = np.append(sizes, [reach * BEYOND, MOST_BYTES])
    missed = np.append(missed, [1.0, 1.0])  # of what a step reads, the part that comes from memory
    came = sizes * missed
    parts = {used: _comes_again(used, hit) for used in read.stacks}

    def misses(size: float, used: float) -> tuple[float, float]:
        """Where a step is like that of a model of so many bytes: of what it reads of a stack the part that comes from
        memory, and that part over the one of what each step reads.
        """
        steps, shares = parts[used]
        once = float(np.interp(size, sizes, came))
        part, one = float(shares @ np.interp(steps * once, came, missed)), float(np.interp(once, came, missed))
        return part, float(shares @ steps) if one <= 0 else part / one

    def alike(size: float) -> float:
        """The bytes of the model that it is like."""
        stacks = ((total * hit(used, 1), used) for used, total in read.stacks.items())
        return read.always + sum(taken * misses(size, used)[1] for taken, used in stacks)

    low, high = 0.0, alike(0.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if alike(middle) > middle else (low, middle)
    one = float(np.interp(np.interp(high, sizes, came), came, missed))
    reads = lambda part: 1 / (near + (far - near) * part)
    return ReadRates(reads(one), {used: reads(misses(high, used)[0]) for used in read.stacks})


def _comes_again(used: float, hit: Callable[[float, int], float]) -> tuple[np.ndarray, np.ndarray]:
    """After how many steps experts that a step takes come again, and which part of them does; the last part is all that
    comes later. Of n steps' experts the last one brought H(n) - H(n - 1): what no step shortly before had (Denning and
    Schwartz 1972, "Properties of the working-set model").
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
