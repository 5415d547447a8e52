"""The seconds of a server's step by its contents, for simulations.

`StepCost` is the interface. `LinearStepCost` has prices that `fit_step_cost` fits to steps. These are measured, by
`ckdist bench steps` and including sampling and Python, or predicted.
"""

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from ckdist.errors import ConfigError
from ckdist.text_file import read_text_file

MAX_FILE_BYTES = 1 << 20
MOST_ROWS = 10_000
CONTEXTS = 4  # number of context lengths for which a step is predicted
MOST = 1e15  # upper limit of each number in a row


class StepTotals(NamedTuple):
    """The contents of a step, as sums over its sequences."""

    prompt_tokens: int = 0
    prompt_attended: int = 0  # positions that prompt tokens attend to
    decodes: int = 0  # sequences with one token each
    decode_context: int = 0  # positions that these tokens attend to
    outputs: int = 0  # rows of logits

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.prompt_tokens + self.decodes


class StepCost(Protocol):
    """The cost of steps."""

    def seconds(self, step: StepTotals, /) -> float:
        """Seconds from scheduling the step to its sampled tokens. They grow with each number of `step`."""
        ...


@dataclass(frozen=True)
class LinearStepCost:
    """Interpolates `seconds_of` linearly over `sizes`, and adds prices for outputs and attention."""

    sizes: tuple[int, ...]  # tokens of a step with one prompt without context, ascending
    seconds_of: tuple[float, ...]  # seconds of each size
    per_output: float = 0.0  # seconds per row of logits after the first
    per_prompt_attended: float = 0.0  # seconds per position that a prompt token attends to
    per_decode_context: float = 0.0  # seconds per position that a decoded token attends to

    def seconds(self, step: StepTotals) -> float:
        """Seconds of the step."""
        base = self._base(step.tokens)
        return (
            base
            + self.per_output * max(0, step.outputs - 1)
            + self.per_prompt_attended * step.prompt_attended
            + self.per_decode_context * step.decode_context
        )

    def _base(self, tokens: int) -> float:
        """Seconds of a prefill step of `tokens` tokens without context."""
        sizes, seconds = self.sizes, self.seconds_of
        above = bisect.bisect_left(sizes, tokens)
        if above == 0:
            return seconds[0]
        if above == len(sizes):
            return seconds[-1] * tokens / sizes[-1]
        low, high = sizes[above - 1], sizes[above]
        return seconds[above - 1] + (seconds[above] - seconds[above - 1]) * (tokens - low) / (high - low)


def step_row(step: StepTotals, seconds: float) -> dict[str, Any]:
    """A measured step as a row of `ckdist bench steps`."""
    return {**step._asdict(), "seconds": seconds}


def read_step_cost(path: str) -> LinearStepCost:
    """Fits prices to a file of `ckdist bench steps -o json`. Raises ConfigError if it cannot be used."""
    try:
        rows = json.loads(read_text_file(path, f"--steps {path[:200]}", MAX_FILE_BYTES))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--steps {path[:200]} is not JSON: {str(error)[:100]}") from None
    if not isinstance(rows, list) or not 1 <= len(rows) <= MOST_ROWS:
        raise ConfigError(
            f"--steps {path} needs a list of 1 to {MOST_ROWS} rows: write it by ckdist bench steps -o json"
        )
    return fit_step_cost([_step_of(row, path) for row in rows], f"--steps {path}")


def _step_of(row: Any, path: str) -> tuple[StepTotals, float]:
    """(step, seconds) of a row. Raises ConfigError if it is invalid."""
    names = (*StepTotals._fields, "seconds")
    numbers: list[Any] = [row.get(name) for name in names] if isinstance(row, Mapping) else [None]
    if not all(type(n) in (int, float) and 0 <= n < MOST for n in numbers) or not numbers[-1]:
        raise ConfigError(
            f"--steps {path} has a row {str(row)[:60]!r}, which needs positive numbers {', '.join(names)}"
        )
    *shape, seconds = numbers
    return StepTotals(*map(int, shape)), float(seconds)


def fit_step_cost(steps: Sequence[tuple[StepTotals, float]], source: str = "the measured steps") -> LinearStepCost:
    """Fits prices to measured steps.

    The table has the median seconds of steps with one prompt without context. Least squares gives the other prices,
    none of them negative. Raises ConfigError, which names `source`, if there is no step with only a prompt.
    """
    alone = _alone(steps)
    if not alone:
        raise ConfigError(f"{source} has no step of one prompt without context: write it by ckdist bench steps -o json")
    sizes = tuple(sorted(alone))
    seconds = np.maximum.accumulate([float(np.median(alone[size])) for size in sizes])
    table = LinearStepCost(sizes, tuple(seconds.tolist()))
    rows = np.array([[max(0, s.outputs - 1), s.prompt_attended, s.decode_context] for s, _ in steps], float)
    rest = np.array([found - table.seconds(s) for s, found in steps])
    # the seconds of the table include the attention of its own prompts
    own = np.array([_own_attended(s.prompt_tokens) if s.decodes == 0 else 0 for s, _ in steps])
    rows[:, 1] = np.maximum(0.0, rows[:, 1] - own)
    weights = 1 / np.array([found for _, found in steps])
    prices = _at_least_zero(rows * weights[:, None], rest * weights)
    return LinearStepCost(sizes, _without_attention(table, prices[1]), *prices)


def linear_step_cost(cost: StepCost, max_tokens: int, max_sequences: int, context: int) -> LinearStepCost:
    """Fits prices to another StepCost, for steps up to these sizes.

    A prediction walks through a program for each step, which is too slow for a simulation with millions of steps.
    """
    most, found = min(max_tokens, context), list[StepTotals]()
    found += [StepTotals(size, _own_attended(size), outputs=1) for size in halves(most)]
    for part in range(1, CONTEXTS):
        before = part * (context - most) // (CONTEXTS - 1)
        found.append(StepTotals(most, most * before + _own_attended(most), outputs=1))
    for count in (1, *halves(max_sequences)):
        each = [1 + part * (context - 1) // (CONTEXTS - 1) for part in range(CONTEXTS)]
        found += [StepTotals(decodes=count, decode_context=count * seen, outputs=count) for seen in each]
    return fit_step_cost([(step, cost.seconds(step)) for step in found])


def halves(most: int) -> list[int]:
    """The powers of two from 2 on below `most`, then `most`."""
    return sorted({most, *(1 << power for power in range(1, most.bit_length()) if 1 << power < most)})


def _alone(steps: Sequence[tuple[StepTotals, float]]) -> dict[int, list[float]]:
    """Tokens -> seconds of steps with one prompt without context."""
    found: dict[int, list[float]] = {}
    for step, seconds in steps:
        if step.decodes == 0 and step.outputs <= 1 and step.prompt_attended == _own_attended(step.prompt_tokens):
            found.setdefault(step.prompt_tokens, []).append(seconds)
    return found


def _own_attended(tokens: int) -> int:
    """Positions that the tokens of a prompt without context attend to: tokens * (tokens + 1) / 2."""
    return tokens * (tokens + 1) // 2


def _without_attention(table: LinearStepCost, price: float) -> tuple[float, ...]:
    """The table's seconds without the attention of its own prompts, which has a separate price; never decreasing."""
    rest = [s - price * _own_attended(n) for n, s in zip(table.sizes, table.seconds_of, strict=True)]
    return tuple(np.maximum.accumulate(np.maximum(rest, 0.0)).tolist())


def _at_least_zero(rows: np.ndarray, wanted: np.ndarray) -> list[float]:
    """Least squares without negative coefficients: they are removed one by one."""
    used = [i for i in range(rows.shape[1]) if rows[:, i].any()]
    while used:
        # scale columns, so that units do not matter
        scale = np.abs(rows[:, used]).max(axis=0)
        found = np.linalg.lstsq(rows[:, used] / scale, wanted, rcond=None)[0] / scale
        if (found >= 0).all():
            return [float(found[used.index(i)]) if i in used else 0.0 for i in range(rows.shape[1])]
        del used[int((found * scale).argmin())]
    return [0.0] * rows.shape[1]
