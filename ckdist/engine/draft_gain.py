"""Decides how many drafted tokens a step verifies: as many as pay, from measured seconds, within a limit of losses."""

from bisect import bisect_left

MEMORY = 0.8  # weight of all earlier steps of a width against the last one
OUTLIER = 2.0  # a step counts at most as this times the estimate
MIN_STEPS = 3  # plain steps of a width before drafts are added to it
REFRESH_STEPS = 50  # a plain step comes at least so often, since contexts and other loads change
FORGET_STEPS = 256  # after which a width that was not used is forgotten, so that it is tried again
MIN_GAIN = 1.03  # predicted tokens per second with and without drafts
# Lost steps that are allowed at once, and that each step allows again: within 200 steps at most 1 %.
MOST_LOST, ALLOWED = 1.0, 0.005


class DraftGain:
    """Seconds of decode steps by their rows, and the steps that drafts have lost.

    Attributes:
        drafted, accepted: Tokens since the start.
        predicted, measured: Seconds that drafts save, since the start: as predicted before their steps, and as the
            accepted tokens gave.
        seconds: Measured seconds of the steps with drafts.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by rows, of widths that were measured twice
        self._once: dict[int, float] = {}  # by rows, of widths that were measured once, since one step may be disturbed
        self._rows: list[int] = []  # the keys of it, ascending
        self._used: set[int] = set()  # rows of the steps since widths were forgotten
        self._steps = 0
        self._plain: dict[int, int] = {}  # by rows: steps without drafts
        self._since_plain = 0
        self._lost = 0.0  # in steps
        self.drafted = self.accepted = self.steps = 0
        self.predicted = self.measured = self.seconds = 0.0

    def cost(self, rows: int) -> float:
        """Predicted seconds of a step with `rows` rows, on a line between the measured numbers."""
        known = self._rows
        if not known:
            return 0.0
        at = bisect_left(known, rows)
        if at < len(known) and known[at] == rows:
            return self._seconds[rows]
        if at == 0 or len(known) == 1:
            return self._seconds[known[0]] * rows / known[0]
        high = min(at, len(known) - 1)
        first, second = known[high - 1], known[high]
        slope = max(0.0, (self._seconds[second] - self._seconds[first]) / (second - first))
        return self._seconds[first] + slope * (rows - first)

    def choose(self, sequences: int, parts: list[float]) -> int:
        """Returns how many of the drafted tokens to verify in a step with `sequences` sequences.

        Args:
            parts: Probability of each drafted token that it is accepted, descending.
        """
        if not parts or self._plain.get(sequences, 0) < MIN_STEPS or self._since_plain >= REFRESH_STEPS:
            return 0
        plain = self.cost(sequences)
        best, most, tokens = MIN_GAIN / plain, 0, float(sequences)
        for count, part in enumerate(parts, 1):
            tokens += part
            speed = tokens / sequences / self._least_cost(sequences + count)
            if speed > best and self._lost + self._most_cost(sequences + count) / plain - 1 <= MOST_LOST:
                best, most = speed, count
        return most

    def _least_cost(self, rows: int) -> float:
        """The cost of a width that was tried, else of the next narrower one."""
        while rows > self._rows[0] and rows not in self._seconds:
            rows -= 1
        return self.cost(rows)

    def _most_cost(self, rows: int) -> float:
        """The cost of a width. One beyond the measured ones is taken to cost twice as much as they suggest."""
        widest = self._rows[-1]
        most = self.cost(rows)
        return most + max(0.0, most - self.cost(widest)) if rows > widest and len(self._rows) > 1 else most

    def observe_plain(self, sequences: int, seconds: float) -> None:
        """Takes the measured seconds of a step without drafts and without prompts."""
        self._measure(sequences, seconds)
        self._plain[sequences] = self._plain.get(sequences, 0) + 1
        self._since_plain = 0
        self._lost = max(0.0, self._lost - ALLOWED)

    def observe(self, sequences: int, drafted: int, accepted: int, expected: float, seconds: float) -> None:
        """Takes the measured seconds of a step with drafts.

        Args:
            expected: The sum of the probabilities of the drafted tokens.
        """
        plain, before = self.cost(sequences) or seconds, self.cost(sequences + drafted) or seconds
        self._measure(sequences + drafted, seconds)
        cost = self.cost(sequences + drafted)
        self._since_plain += 1
        self._lost = max(0.0, self._lost + cost / plain - (sequences + accepted) / sequences - ALLOWED)
        self.steps += 1
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        self.predicted += plain * (1 + expected / sequences) - before
        self.measured += plain * (1 + accepted / sequences) - seconds
        self.seconds += seconds

    def _measure(self, rows: int, seconds: float) -> None:
        known = self._seconds.get(rows)
        if known is not None:
            self._seconds[rows] = MEMORY * known + (1 - MEMORY) * min(seconds, OUTLIER * known)
        elif rows in self._once or not self._seconds:
            self._seconds[rows] = min(seconds, self._once.pop(rows, seconds))
        else:
            self._once[rows] = seconds
        self._used.add(rows)
        self._steps += 1
        if self._steps % FORGET_STEPS == 0:
            self._seconds = {rows: cost for rows, cost in self._seconds.items() if rows in self._used}
            self._plain = {rows: count for rows, count in self._plain.items() if rows in self._used}
            self._used.clear()
        self._rows = sorted(self._seconds)
