"""Counts of a simulation: the times of each request, and a histogram of gaps between tokens."""

import math
from dataclasses import dataclass, field

import numpy as np

LEAST_SECONDS, BIN = 1e-7, math.log(1.005)  # bins of half a per cent
BINS = 6200  # up to e6 s
FINISHED, FAILED, REFUSED = 0, 1, 2  # how a request ended


class Gaps:
    """A histogram of gaps between tokens. Each bin is half a per cent wide."""

    def __init__(self) -> None:
        self.counts = np.zeros(BINS, np.int64)

    def add(self, seconds: float, count: int = 1) -> None:
        """Adds `count` gaps of `seconds`."""
        self.counts[_bin(seconds)] += count

    def add_line(self, first: float, last: float, steps: int, count: int) -> None:
        """Adds `count` gaps of each of `steps` lengths, evenly from `first` to `last`."""
        low, high = _bin(first), _bin(last)
        done, more = 0, (last - first) / max(1, steps - 1)
        for at in range(low, high):
            end = LEAST_SECONDS * math.exp((at + 1) * BIN)
            upto = min(steps, math.ceil((end - first) / more))
            self.counts[at] += (upto - done) * count
            done = upto
        self.counts[high] += (steps - done) * count

    def quantile(self, part: float) -> float | None:
        """Returns the quantile `part` in seconds; None without gaps."""
        total = int(self.counts.sum())
        if not total:
            return None
        at = int(np.searchsorted(np.cumsum(self.counts), part * total))
        return LEAST_SECONDS * math.exp((at + 0.5) * BIN)


def _bin(seconds: float) -> int:
    return min(BINS - 1, int(math.log(max(seconds, LEAST_SECONDS) / LEAST_SECONDS) / BIN))


# A row of an ended request: times, tokens, and how it ended.
ROW = np.dtype([
    *((name, np.float64) for name in ("arrival", "first", "end")),
    *((name, np.int64) for name in ("prompt", "output", "cached", "how")),
])  # fmt: skip


@dataclass
class Observed:
    """Results of some replicas: a ROW per ended request, and sums. Seconds are of the simulated clock."""

    rows: list[tuple[float, float, float, int, int, int, int]] = field(default_factory=list)
    gaps: Gaps = field(default_factory=Gaps)
    steps: int = 0
    preemptions: int = 0
    failures: int = 0
    longest_queue: int = 0
    busy: float = 0.0  # seconds of stages at work
    waiting: float = 0.0  # seconds of requests in the queue
    running: float = 0.0  # seconds of requests after the queue
    end: float = 0.0  # time of the last end of a request

    @property
    def table(self) -> np.recarray:
        """The rows as an array of ROW."""
        return np.array(self.rows, ROW).view(np.recarray)

    def add(self, other: "Observed") -> None:
        """Adds the results of other replicas."""
        self.rows += other.rows
        self.gaps.counts += other.gaps.counts
        self.longest_queue, self.end = max(self.longest_queue, other.longest_queue), max(self.end, other.end)
        for name in ("steps", "preemptions", "failures", "busy", "waiting", "running"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
