"""Measured seconds of a model's decode steps by their rows."""

from bisect import bisect_left

MEMORY = 0.8  # weight of all earlier steps of a width against the last one
FALLS = 0.5  # the same if the last one was faster: other processes disturb steps, and nothing makes them faster
OUTLIER = 2.0  # a step counts at most as this times the estimate
FORGET_STEPS = 256  # after which a width that was not used is forgotten, so that it is tried again


class RowCosts:
    """Seconds of steps by their rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by rows, of widths that were measured twice
        self._once: dict[int, float] = {}  # by rows, of widths that were measured once, since one step may be disturbed
        self._rows: list[int] = []  # the keys of `_seconds`, ascending
        self._used: set[int] = set()  # rows of the steps since widths were forgotten
        self._steps = 0

    def is_known(self, rows: int) -> bool:
        """True if steps of this width were measured."""
        return rows in self._seconds

    def spans(self, rows: int) -> bool:
        """True if steps that are at most, and that are at least, so wide were measured."""
        return bool(self._rows) and self._rows[0] <= rows <= self._rows[-1]

    def cost(self, rows: int) -> float:
        """Predicted seconds of a step with `rows` rows, on a line between the measured numbers. 0.0: none is known."""
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

    def least_cost(self, rows: int) -> float:
        """The cost of a width. If only one was measured, wider ones are taken to cost no more, so that one is tried."""
        return self.cost(rows if len(self._rows) > 1 else self._rows[0])

    def most_cost(self, rows: int) -> float:
        """The cost of a width. One beyond the measured ones is taken to cost twice as much as they suggest."""
        widest = self._rows[-1]
        if rows in self._once:
            return self._once[rows]
        most = self.cost(rows)
        return most + max(0.0, most - self.cost(widest)) if rows > widest and len(self._rows) > 1 else most

    def measure(self, rows: int, seconds: float, is_plain: bool = False) -> float:
        """Takes the seconds of a step. Returns them, or fewer if it seems that something disturbed it.

        Args:
            is_plain: The other widths keep their ratio to this one. Else those that were measured while something
                disturbed them would seem to cost too much, and would not be measured again.
        """
        usual = min(seconds, OUTLIER * (self.cost(rows) or seconds))
        known = self._seconds.get(rows)
        if known is not None:
            memory = MEMORY if usual > known else FALLS
            new = self._seconds[rows] = memory * known + (1 - memory) * usual
            if is_plain:
                self._seconds = {width: cost * new / known for width, cost in self._seconds.items()}
                self._once = {width: cost * new / known for width, cost in self._once.items()}
                self._seconds[rows] = new
        elif rows in self._once:
            self._seconds[rows] = min(seconds, self._once.pop(rows))
        else:
            self._once[rows] = seconds
        self._used.add(rows)
        self._steps += 1
        if self._steps % FORGET_STEPS == 0:
            self._seconds = {rows: cost for rows, cost in self._seconds.items() if rows in self._used}
            self._used.clear()
        self._rows = sorted(self._seconds)
        return usual
