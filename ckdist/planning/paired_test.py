"""Whether one of two ways is faster, from pairs of runs right after one another: a group sequential signed-rank test.

`logs` are logarithms of the ratio of seconds, of the way in question to the other; where the ways are equal their signs
are tosses of a coin, whatever slows the machine. They are looked at after LOOKS pairs: before the last look only what
has a chance of 1 in 1,000 decides (Haybittle and Peto), at the last look one of 1 in 50, so equal ways are told apart
by mistake in less than 2.5 % of cases.
"""

import math
import statistics

LOOKS = 16, 40, 100, 250, 600  # pairs
EARLY, LAST = 3.09, 2.05  # standard deviations that decide before the last look and at it: one-sided 0.1 % and 2 %
LEAST_GAIN = 0.03  # of the time: less is not worth another way
UNLIKELY = 0.5  # standard deviations to the slower side, from the third look on: no gain is to be expected any more
POWER = 1.28  # standard deviations: a test that is begun finds what is expected in nine cases of ten
FASTER, NO_FASTER = "faster", "no faster"  # surely
UNSEEN, NOISY = "no gain seen", "too noisy"  # what was expected would have shown; or it need not have


def look(logs: list[float], last: bool, expected: float | None = None, most: int = LOOKS[-1]) -> str | None:
    """What is known after these pairs: FASTER, NO_FASTER, UNSEEN or NOISY, which all end the test; None: go on to the
    next look.

    `expected`: the gain (0.1: a tenth of the time) that `most` pairs, all that there is time for, should be able to
    show; None: any.
    """
    z = signed_rank(logs)
    least = math.log(1 - LEAST_GAIN)
    if z <= -(LAST if last else EARLY) and statistics.median(logs) <= least:
        return FASTER
    if signed_rank([value - least for value in logs]) >= EARLY:
        return NO_FASTER
    if len(logs) >= LOOKS[2] and z > UNLIKELY:
        return UNSEEN
    likely = max(expected or 0.0, 1 - math.exp(statistics.median(logs)))  # or what is seen so far
    noisy = expected is not None and pairs_for(likely, logs) > (len(logs) if last else most)
    if last:
        return NOISY if noisy else UNSEEN
    return NOISY if noisy and len(logs) >= LOOKS[1] else None


def pairs_for(gain: float, logs: list[float]) -> float:
    """How many pairs as noisy as these show a gain at the last look, in nine cases of ten."""
    middle = statistics.median(logs)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in logs)  # of a normal distribution
    return ((LAST + POWER) * deviation / math.log(1 - gain)) ** 2


def signed_rank(values: list[float]) -> float:
    """Wilcoxon's signed-rank statistic in standard deviations of the normal approximation, negative where values
    are.
    """
    ordered = sorted((value for value in values if value), key=abs)
    n = len(ordered)
    if n == 0:
        return 0.0
    total = sum(math.copysign(rank, value) for rank, value in enumerate(ordered, 1))
    return total / math.sqrt(n * (n + 1) * (2 * n + 1) / 6)


def median_within(values: list[float]) -> tuple[float, float, float]:
    """The median, and before and after it the values between which the median of what they are drawn from lies with 93
    to 98 % (sign test).

    Fewer than five values cannot say that: then the least and the largest, which hold it less often.
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
