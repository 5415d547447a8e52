"""Decides how many drafted tokens a step verifies: as many as pay, from measured seconds, within a limit of losses."""

from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from math import inf
from typing import NamedTuple

from ckdist.engine.row_costs import RowCosts

MIN_STEPS = 3  # plain steps of a width before drafts are added to it
SAMPLED = 16  # one of that many consecutive plain steps is measured
REFRESH_STEPS = 50  # a plain step comes at least that often, since contexts and other loads change
MIN_GAIN = 1.03  # predicted tokens per second with and without drafts
WINDOW = 200  # steps, of which drafts may lose 1 %
MOST_LOST = 2.0  # steps of any window
# Weight of all earlier verified tokens against those of the last step, and of tokens before any was verified.
FADES, PRIOR = 0.98, 2.0
MOST_TRIED = 0.4  # lost steps of a window above which a draft model is not tried, so that wider steps can be
ROUNDING = 1e-9  # steps


class Option(NamedTuple):
    """Drafts that a step may verify."""

    accepted: float  # expected tokens that are right
    rows: int  # drafted tokens
    spent: float = 0.0  # seconds that a draft model takes before the step


class Price(NamedTuple):
    """The expected tokens of a sequence, and the time of a step in plain steps."""

    tokens: float
    cost: float
    least: float  # differs from `cost` if the width was never measured
    most: float


class DraftGain:
    """Seconds of decode steps by their rows, and the steps that drafts have lost.

    Attributes:
        costs: Seconds of the steps, without those of a draft model.
        drafted, accepted: Tokens since the start.
        predicted, measured: Seconds that drafts saved since the start: as predicted before each step, and as computed
            from the accepted tokens.
        seconds: Measured seconds of the steps with drafts, and of a draft model.
    """

    def __init__(self) -> None:
        self.costs = RowCosts()
        self._plain: dict[int, int] = {}  # by rows: steps without drafts
        self._since_plain = 0
        self._losses = deque[tuple[int, float]]()  # (number of the step, lost steps), since the losses began
        self._lost = 0.0  # the most that any run of the last steps of a window has lost, in steps
        self._fastest = 1.0  # tokens per plain step of the best option without a limit of losses
        self._wrong = 0.0  # probability that the drafts of the narrowest option are wrong
        self._stake = 1.0  # steps that the narrowest option loses then
        self._expected = self._right = PRIOR  # tokens, of which earlier ones count less
        self._step = 0
        self.drafted = self.accepted = self.steps = 0
        self.predicted = self.measured = self.seconds = 0.0

    def choose(self, sequences: int, parts: list[float], spent: float = 0.0) -> int:
        """Returns how many of the drafted tokens to verify in a step with `sequences` sequences.

        Args:
            parts: Probability of each drafted token that it is accepted, descending.
            spent: Seconds that a draft model has taken for them already.
        """
        right = accumulate(parts)
        options = (Option(accepted, count, spent) for count, accepted in enumerate(right, 1))
        return self.best(sequences, options, spent)[0]

    def best(self, sequences: int, options: Iterable[Option], spent: float = 0.0) -> tuple[int, float]:
        """Returns the best option, counted from 1, and its tokens per second and sequence. (0, 0.0): no option pays.

        Args:
            spent: Seconds of a draft model that are lost without drafts.
        """
        plain = self.costs.cost(sequences)
        if self._plain.get(sequences, 0) < MIN_STEPS or not self.costs.is_known(sequences) or self.is_due:
            return 0, 0.0
        options = list(options)
        prices = [self._price(sequences, plain, option) for option in options]
        if not prices:
            return 0, 0.0
        self._fastest = max(1.0, *(price.tokens / price.cost for price in prices))
        self._wrong = max(0.0, 1 - (prices[0].tokens - 1) * sequences / options[0].rows)
        self._stake = prices[0].cost - 1
        least = MIN_GAIN / (1 + spent / plain)
        most, best, speed = 0, -inf, 0.0
        for count, price in enumerate(prices, 1):
            if price.tokens > least * price.least and (value := self._value(price)) > best:
                most, best, speed = count, value, price.tokens / price.least
        return most, speed / plain

    def _price(self, sequences: int, plain: float, option: Option) -> Price:
        costs, rows = self.costs, sequences + option.rows
        tokens = 1 + self._corrected(option.accepted) / sequences
        cost = (costs.cost(rows) + option.spent) / plain
        if costs.is_known(rows):
            return Price(tokens, cost, cost, cost)
        least, most = costs.least_cost(rows) + option.spent, costs.most_cost(rows) + option.spent
        return Price(tokens, cost, least / plain, most / plain)

    def _corrected(self, expected: float) -> float:
        """Expected right tokens, scaled by the recent ratio of right to expected guesses if it is below 1."""
        return min(1.0, self._right / self._expected) * expected

    def _value(self, price: Price) -> float:
        """Expected gain of an option in tokens of a sequence, less the price of its risk. -inf: it is not allowed.

        At the limit, a window passes without drafts. That happens if these drafts are wrong, and then those of all
        narrow steps that still fit. A width that was never measured is tried without regard to that.
        """
        if self._lost + price.most - 1 > MOST_LOST + ROUNDING:
            return -inf
        gain = price.tokens - self._fastest * price.least
        if price.most > price.cost or self._stake <= 0:
            return gain
        fits = (MOST_LOST - self._lost - price.cost + 1) / self._stake
        return gain - WINDOW * (self._fastest - 1) * self._wrong ** (1 + fits)

    def is_better(self, sequences: int, option: Option, than: Option) -> bool:
        """Returns True if an option is worth more than another one, and is allowed."""
        plain = self.costs.cost(sequences)
        value, other = (self._value(self._price(sequences, plain, choice)) for choice in (option, than))
        return value > other

    def allows(self, sequences: int, spent: float) -> bool:
        """Returns True if a draft model may spend these seconds to measure its acceptance."""
        plain = self.costs.cost(sequences)
        return self._plain.get(sequences, 0) >= MIN_STEPS and self._lost + spent / plain <= MOST_TRIED

    def lose(self, sequences: int, seconds: float) -> None:
        """Counts seconds in which a draft model was measured."""
        self._count(seconds / self.costs.cost(sequences))

    def _count(self, lost: float) -> None:
        """Counts lost steps, which are negative if drafts gained."""
        losses = self._losses
        if lost:
            losses.append((self._step, lost))
        elif not losses or losses[0][0] > self._step - WINDOW:
            return
        while losses and losses[0][0] <= self._step - WINDOW:
            losses.popleft()
        self._lost = max(accumulate((lost for _, lost in reversed(losses)), initial=0.0))
        if not self._lost:
            losses.clear()

    @property
    def is_due(self) -> bool:
        """The next step must have no drafts, since plain steps are to be measured."""
        return self._since_plain >= REFRESH_STEPS

    def _verify(self, right: int, expected: float) -> None:
        """Counts drafted tokens that were right and those that were expected to be. Earlier ones count less."""
        self._right = FADES * self._right + right + (1 - FADES) * PRIOR
        self._expected = FADES * self._expected + expected + (1 - FADES) * PRIOR

    def skips(self, sequences: int) -> bool:
        """Counts a plain step that needs no measurement. Returns False if it needs one."""
        if self._since_plain or self._step % SAMPLED == 0 or self._plain.get(sequences, 0) <= MIN_STEPS:
            return False
        self._step += 1
        return True

    def observe_plain(self, sequences: int, seconds: float, spent: float = 0.0) -> None:
        """Takes the measured seconds of a step without drafts and without prompts.

        Args:
            spent: Seconds of a draft model before it.
        """
        self._step += 1
        self._verify(0, 0.0)  # or drafts that began badly would not be tried again
        usual = self.costs.measure(sequences, seconds, is_plain=True)
        self._plain[sequences] = self._plain.get(sequences, 0) + 1
        self._since_plain = 0
        self._count(spent / usual)

    def observe(
        self, sequences: int, drafted: int, accepted: int, expected: float, seconds: float, spent: float = 0.0
    ) -> None:
        """Takes the measured seconds of a step with drafts.

        Args:
            expected: The sum of the probabilities of the drafted tokens.
            spent: Seconds of a draft model before it.
        """
        costs = self.costs
        plain, before = costs.cost(sequences) or seconds, costs.cost(sequences + drafted) or seconds
        cost = costs.measure(sequences + drafted, seconds) + spent
        self._since_plain += 1
        self._step += 1
        lost = cost / plain - (sequences + accepted) / sequences
        predicted = self._corrected(expected)
        self._verify(accepted, expected)
        self._count(lost)
        self.steps += 1
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        self.predicted += plain * (1 + predicted / sequences) - before
        self.measured += plain * (1 + accepted / sequences) - seconds
        self.seconds += seconds

    def spend(self, seconds: float) -> None:
        """Counts seconds of a draft model in the gain."""
        self.predicted -= seconds
        self.measured -= seconds
        self.seconds += seconds
