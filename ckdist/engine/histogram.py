"""Histograms as in Prometheus: counts of values in fixed buckets, without the values themselves."""

from bisect import bisect_left


class Histogram:
    """Buckets with ascending, inclusive upper `bounds`, and one more for larger values."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def numbers(self, name: str) -> dict[str, float]:
        """`name_sum`, `name_count`, and `name_le_BOUND`: the number of values <= BOUND."""
        result: dict[str, float] = {f"{name}_sum": self.sum, f"{name}_count": sum(self.counts)}
        below = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            below += count
            result[f"{name}_le_{bound:g}"] = below
        return result
