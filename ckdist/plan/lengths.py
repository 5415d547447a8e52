"""Distributions of the lengths of prompts and outputs, as a user writes them.

`512`, `uniform:128:2048` (both ends included), `exponential:300` (its mean) or `lognormal:400:0.8` (its median, and the
standard deviation of its logarithm).
"""

from dataclasses import dataclass

import numpy as np

MOST_TOKENS = 1 << 24
FORMS = {"uniform": "LOW:HIGH", "exponential": "MEAN", "lognormal": "MEDIAN:SIGMA"}
MOST_SIGMA = 5.0


@dataclass(frozen=True)
class Lengths:
    """A distribution of numbers of tokens: whole numbers, at least 1."""

    kind: str
    first: float
    second: float = 0.0

    @property
    def mean(self) -> float:
        """The mean of the distribution before rounding."""
        match self.kind:
            case "uniform":
                return (self.first + self.second) / 2
            case "lognormal":
                return self.first * float(np.exp(self.second**2 / 2))
        return self.first

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draws int64 (count,)."""
        match self.kind:
            case "uniform":
                found = rng.integers(int(self.first), int(self.second), count, endpoint=True)
            case "exponential":
                found = rng.exponential(self.first, count)
            case "lognormal":
                found = rng.lognormal(np.log(self.first), self.second, count)
            case _:
                found = np.full(count, self.first)
        return np.clip(np.rint(found), 1, MOST_TOKENS).astype(np.int64)


def parse_lengths(text: str) -> Lengths:
    """Returns the distribution that `text` describes. Raises ValueError if it describes none."""
    name, *parts = text.split(":")
    if not parts:
        name, parts = "fixed", [name]
    forms = "a number or " + ", ".join(f"{known}:{form}" for known, form in FORMS.items())
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        raise ValueError(f"is not {forms}") from None
    if len(numbers) != FORMS.get(name, "N").count(":") + 1 or (name != "fixed" and name not in FORMS):
        raise ValueError(f"is not {forms}")
    first, second = numbers[0], numbers[1] if len(numbers) > 1 else 0.0
    if not 1 <= first <= MOST_TOKENS:
        raise ValueError(f"is not from 1 to {MOST_TOKENS} tokens")
    if name == "uniform" and not first <= second <= MOST_TOKENS:
        raise ValueError(f"ends at {second:g}; the end is from {first:g} to {MOST_TOKENS}")
    if name == "lognormal" and not 0 <= second <= MOST_SIGMA:
        raise ValueError(f"has a sigma of {second:g}; it is from 0 to {MOST_SIGMA:g}")
    return Lengths(name, first, second)
