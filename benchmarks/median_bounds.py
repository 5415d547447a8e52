"""A median and its bounds."""

import math
import statistics


def median_within(values: list[float]) -> tuple[float, float, float]:
    """(low, median, high): the median of the distribution is between low and high with 93 to 98 % (sign test).

    For fewer than five values: minimum and maximum, with a lower probability.
    """
    ordered, n = sorted(values), len(values)
    left_out = max(
        0, int((n + 1) / 2 - 0.98 * math.sqrt(n)) - 1
    )  # on each side; the normal approximation of the binomial's quantile
    return ordered[left_out], statistics.median(ordered), ordered[n - 1 - left_out]
