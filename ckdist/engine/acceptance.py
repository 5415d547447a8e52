"""The share of drafted tokens that are right, by classes of tokens."""

from collections.abc import Sequence

PRIOR_WEIGHT = 2.0  # of the prior, in tokens
OWN_WEIGHT = 8.0  # of the engine's estimate against the tokens of one sequence
FADES = 0.95


class Acceptance:
    """The share of drafted tokens that are right, by their class. Earlier tokens count less.

    Args:
        priors: The part that is right of each class, before any token was seen.
        fades: Weight of all earlier tokens against the last one.
        parent: The estimate over all sequences, which this one begins with and adds to.
    """

    def __init__(self, priors: Sequence[float], fades: float = FADES, parent: "Acceptance | None" = None) -> None:
        self._priors, self._fades, self._parent = priors, fades, parent
        self._right = [0.0] * len(priors)
        self._all = [0.0] * len(priors)

    def of_sequence(self) -> "Acceptance":
        """The estimate of one more sequence."""
        return Acceptance(self._priors, self._fades, self)

    def count(self, place: int, right: bool) -> None:
        """Takes note of a drafted token of class `place`."""
        self._right[place] = self._fades * self._right[place] + right
        self._all[place] = self._fades * self._all[place] + 1
        if self._parent is not None:
            self._parent.count(place, right)

    def part(self, place: int) -> float:
        """The part of the tokens of class `place` that are right."""
        prior, weight = self._priors[place], PRIOR_WEIGHT
        if self._parent is not None:
            prior, weight = self._parent.part(place), OWN_WEIGHT
        return (self._right[place] + prior * weight) / (self._all[place] + weight)
