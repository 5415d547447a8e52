"""Decides how many drafted tokens a step verifies: as many as pay, from measured seconds, within a limit of losses."""

from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from ckdist.engine.row_costs import RowCosts

MIN_STEPS = 3  # plain steps of a width before drafts are added to it
SAMPLED = 4  # of plain steps after one another, one in so many is measured
REFRESH_STEPS = 50  # a plain step comes at least so often, since contexts and other loads change
MIN_GAIN = 1.03  # predicted tokens per second with and without drafts
WINDOW = 200  # steps, of which drafts may lose 1 %
MOST_LOST = 1.8  # steps of any window; prompts of a draft model may take 0.2 more
# That part of the steps that drafts saved lately may be lost in addition, at most so many steps: a run of wrong drafts
# does not end drafts that pay.
RISKED, MOST_RISKED = 0.05, 4.0
STAKES = 3.0  # steps with more than one draft of a sequence: so many of them may fail before the limit
# Weight of all earlier verified tokens against those of the last step, and of tokens before any was verified.
FADES, PRIOR = 0.98, 2.0
MOST_TRIED = 0.4  # lost steps of a window above which a draft model is not tried, so that wider steps can be


class Option(NamedTuple):
    """Drafts that a step may verify."""

    accepted: float  # expected tokens that are right
    rows: int  # drafted tokens
    spent: float = 0.0  # seconds that a draft model takes before the step


class DraftGain:
    """Seconds of decode steps by their rows, and the steps that drafts have lost.

    Attributes:
        costs: Seconds of the steps, without those of a draft model.
        drafted, accepted: Tokens since the start.
        predicted, measured: Seconds that drafts save, since the start: as predicted before their steps, and as the
            accepted tokens gave.
        seconds: Measured seconds of the steps with drafts, and of a draft model.
    """

    def __init__(self) -> None:
        self.costs = RowCosts()
        self._plain: dict[int, int] = {}  # by rows: steps without drafts
        self._since_plain = 0
        self._losses = deque[tuple[int, float]]()  # (number of the step, lost steps), since the losses began
        self._lost = 0.0  # the most that any run of the last steps of a window has lost, in steps
        self._saved = 0.0  # steps, of which earlier ones count less
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
        costs, best, most = self.costs, 0.0, 0
        if self._plain.get(sequences, 0) < MIN_STEPS or not costs.is_known(sequences):
            return 0, 0.0
        if self.is_due:
            return 0, 0.0
        least = MIN_GAIN / (costs.cost(sequences) + spent)
        for count, option in enumerate(options, 1):
            speed = self._speed(sequences, option)
            if speed > max(least, best) and self._is_allowed(sequences, option):
                best, most = speed, count
        return most, best

    def _speed(self, sequences: int, option: Option) -> float:
        seconds = self.costs.least_cost(sequences + option.rows) + option.spent
        return (1 + self._corrected(option.accepted) / sequences) / seconds

    def _corrected(self, expected: float) -> float:
        """Expected right tokens, if lately fewer were right than were expected."""
        return min(1.0, self._right / self._expected) * expected

    def _is_allowed(self, sequences: int, option: Option) -> bool:
        worst = self.costs.most_cost(sequences + option.rows) + option.spent
        limit = MOST_LOST + min(MOST_RISKED, RISKED * self._saved)
        stake = worst / self.costs.cost(sequences) - 1
        return self._lost + (stake if option.rows <= sequences else STAKES * stake) <= limit

    def is_better(self, sequences: int, option: Option, than: Option) -> bool:
        """Returns True if an option gives more tokens per second than another one, and may be taken."""
        faster = self._speed(sequences, option) > self._speed(sequences, than)
        return faster and self._is_allowed(sequences, option)

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
        """Whether the next step must have no drafts, to measure it."""
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
        usual = self.costs.measure(sequences, seconds)
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
        self._saved = max(0.0, self._saved * (1 - 1 / WINDOW) - lost)
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
