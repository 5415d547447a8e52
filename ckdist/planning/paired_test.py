"""Tests whether one of two variants is faster, from pairs of consecutive runs: a group sequential signed-rank test.

`logs` are the logarithms of the ratio of seconds, tested variant / other variant. If both are equally fast, the signs
are random, independent of other load on the machine. There is a look after each number of pairs in LOOKS. Before the
last look, only a chance of 1 in 1,000 decides (Haybittle and Peto), at the last look one of 1 in 50. So the test finds
a difference between equal variants in less than 2.5 % of cases.
"""

import math
import statistics

LOOKS = 16, 40, 100, 250, 600  # pairs
EARLY, LAST = 3.09, 2.05  # deciding standard deviations before and at the last look: one-sided 0.1 % and 2 %
LEAST_GAIN = 0.03  # smallest useful gain, as a fraction of the time
UNLIKELY = 0.5  # standard deviations to the slower side that end the test from the third look on
POWER = 1.28  # standard deviations: the test finds the expected gain in nine of ten cases
FASTER, NO_FASTER = "faster", "no faster"  # sure results
UNSEEN, NOISY = "no gain seen", "too noisy"  # the test would, or would not, have found the expected gain


def look(logs: list[float], last: bool, expected: float | None = None, most: int = LOOKS[-1]) -> str | None:
    """The result after these pairs: FASTER, NO_FASTER, UNSEEN or NOISY; None: continue to the next look.

    Args:
        logs: Logarithms of the ratios so far.
        last: Whether this is the last look.
        expected: The expected gain (0.1: a tenth of the time). None: any.
        most: Number of pairs that fit the time limit; the test should be able to find the expected gain in these.
    """
    z = signed_rank(logs)
    least = math.log(1 - LEAST_GAIN)
    if z <= -(LAST if last else EARLY) and statistics.median(logs) <= least:
        return FASTER
    if signed_rank([value - least for value in logs]) >= EARLY:
        return NO_FASTER
    if len(logs) >= LOOKS[2] and z > UNLIKELY:
        return UNSEEN
    likely = max(expected or 0.0, 1 - math.exp(statistics.median(logs)))  # the expected or the observed gain
    noisy = expected is not None and pairs_for(likely, logs) > (len(logs) if last else most)
    if last:
        return NOISY if noisy else UNSEEN
    return NOISY if noisy and len(logs) >= LOOKS[1] else None


def pairs_for(gain: float, logs: list[float]) -> float:
    """The number of pairs, with the noise of `logs`, that show a gain at the last look in nine of ten cases."""
    middle = statistics.median(logs)
    # standard deviation of a normal distribution, from the median absolute deviation
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in logs)
    return ((LAST + POWER) * deviation / math.log(1 - gain)) ** 2


def signed_rank(values: list[float]) -> float:
    """Wilcoxon's signed-rank statistic, in standard deviations of the normal approximation."""
    ordered = sorted((value for value in values if value), key=abs)
    n = len(ordered)
    if n == 0:
        return 0.0
    total = sum(math.copysign(rank, value) for rank, value in enumerate(ordered, 1))
    return total / math.sqrt(n * (n + 1) * (2 * n + 1) / 6)


def median_within(values: list[float]) -> tuple[float, float, float]:
    """(low, median, high): the median of the distribution is between low and high with 93 to 98 % (sign test).

    For fewer than five values: minimum and maximum, with a lower probability.
    """
    ordered, n = sorted(values), len(values)
    left_out = max(
        0, int((n + 1) / 2 - 0.98 * math.sqrt(n)) - 1
    )  # on each side; the normal approximation of the binomial's quantile
    return ordered[left_out], statistics.median(ordered), ordered[n - 1 - left_out]


__all__ = [
    "FASTER",
    "LEAST_GAIN",
    "LOOKS",
    "NOISY",
    "NO_FASTER",
    "UNSEEN",
    "look",
    "median_within",
    "pairs_for",
    "signed_rank",
]
