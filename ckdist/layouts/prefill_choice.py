"""Chooses the number of tokens from which on a step with prompts runs token-parallel.

Both forms give the same bits, so only speed matters. They run in pairs, and a sign test over the pairs decides whether
token-parallel is faster. `ckdist.engine.prefill_measurement` runs them.
"""

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ckdist.program.executable import DECODE, PREFILL

PAIRS, AGREED = 31, 12  # most pairs of a size; equal signs that end it early (a chance of 1 in 4,096)
CHANCE = 0.01  # of a wrong decision
FORMS = (DECODE, PREFILL)
LEAST_GAIN = 0.03  # smallest useful gain, as a fraction of the time
Measured = tuple[int, float, bool | None]  # tokens, ratio of seconds, whether token-parallel is faster (None: unsure)


@dataclass(frozen=True)
class PrefillChoice:
    """The choice for steps with prompts."""

    from_tokens: int = sys.maxsize  # steps with at least this number of tokens run token-parallel
    reason: str = ""  # the choice and its reason, in a few words
    ratios: tuple[tuple[int, float], ...] = ()  # measured (tokens, seconds token-parallel / seconds tensor-parallel)


def choose(rows: list[Measured], kept: bool = False) -> PrefillChoice:
    """The choice by measured sizes, the largest first."""
    faster = [tokens for tokens, _, is_faster in rows if is_faster]
    gain = 100 * (1 - rows[0][1])
    found = f"{'measured before' if kept else 'measured'}: {abs(gain):.0f} % {'slower' if gain < 0 else 'faster'}"
    reason = f"token-parallel from {faster[-1]} tokens" if faster else "tensor-parallel"
    doubt = ", within the noise" if rows[0][2] is None else ""
    named = "" if faster else " token-parallel"
    return PrefillChoice(
        faster[-1] if faster else sys.maxsize,
        f"{reason} ({found}{named} at {rows[0][0]}{doubt})",
        tuple((tokens, ratio) for tokens, ratio, _ in rows),
    )


def compare(
    seconds_of: Callable[[int], float], limit: float, clock: Callable[[], float], forms: tuple[int, int] = FORMS
) -> tuple[float, bool | None]:
    """(median ratio, whether the second form is at least LEAST_GAIN faster than the first). None: neither is sure."""
    ratios, won, end = [], 0, clock() + limit
    while len(ratios) < PAIRS and (not ratios or clock() < end):
        order = forms if len(ratios) % 2 else forms[::-1]
        took = {form: seconds_of(form) for form in order}
        ratios.append(took[forms[1]] / took[forms[0]])
        won = sum(ratio < 1 - LEAST_GAIN for ratio in ratios)
        if len(ratios) >= AGREED and won in (0, len(ratios)):
            break
    count, ratio = len(ratios), statistics.median(ratios)
    if by_chance(count, max(won, count - won)) > CHANCE:
        return ratio, None
    return ratio, won > count / 2


def by_chance(count: int, least: int) -> float:
    """The chance that at least `least` of `count` fair coins show heads."""
    return sum(math.comb(count, heads) for heads in range(least, count + 1)) / 2**count
