"""How fast a step reads its weights and caches where some of them lie in the last-level cache since an earlier step.

A byte is still there if few enough others were read since (Mattson et al. 1970, "Evaluation techniques for storage
hierarchies"). What each step reads comes again after one step. An expert comes again after as many as chance has it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

MOST_STEPS = 512  # between two uses of an expert that are told apart
LEAST_SHARE = 1e-3  # of an expert's uses: so few later ones count as the last


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

    `hit(used, steps)`: the part of a stack that so many steps touch; `rate(bytes)`: bytes per second of what comes
    again after so many others; beyond `reach` all rates are the same.
    """

    def touched(steps: int) -> float:
        """Bytes that so many steps read, each once."""
        return read.always + sum(size * hit(used, steps) for used, size in read.stacks.items())

    def seconds(used: float) -> float:
        """Of a byte of a stack, in the mean."""
        return sum(part / rate(touched(steps)) for steps, part in _comes_again(lambda n: hit(used, n), touched, reach))

    return ReadRates(rate(touched(1)), {used: 1 / seconds(used) for used in read.stacks})


def _comes_again(
    hit: Callable[[int], float], touched: Callable[[int], float], reach: float
) -> Iterator[tuple[int, float]]:
    """After how many steps experts that a step takes come again, and which part of them does; the last part is all that
    comes later. Of n steps' experts the last one brought H(n) - H(n - 1): what no step shortly before had (Denning and
    Schwartz 1972, "Properties of the working-set model").
    """
    once, steps, new = hit(1), 1, 1.0
    while True:
        later = max(0.0, (hit(steps + 1) - hit(steps)) / once)
        if later < LEAST_SHARE or steps == MOST_STEPS or touched(steps) > reach:
            yield steps, new
            return
        yield steps, new - later
        steps, new = steps + 1, later


__all__ = ["BytesRead", "ReadRates", "read_rates"]
