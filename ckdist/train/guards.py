"""Guards of a training: steps whose loss or gradient is not finite, is far above its running mean, or is zero.

Every rank has the same loss and norm, so all ranks decide the same. The running means are part of a checkpoint.
"""

import math
from dataclasses import replace

from ckdist.errors import EngineError
from ckdist.train.config import TrainConfig
from ckdist.train.report import StepReport
from ckdist.train.training_checkpoint import TrainState

DECAY = 0.95  # of the running means
FIRST_UPDATES = 20  # nothing is a spike before
NORM_FACTOR = 10.0  # times its running mean: a spike of the gradient's norm
LOSS_FACTOR, LOSS_NATS = 2.0, 1.0  # a spike of the loss: above this factor of its running mean, plus these nats

MOST_IN_A_ROW = 10
MOST_PART = 10  # at most one in MOST_PART of all steps may be lost; a single one always may


class Guards:
    """Decides about steps by `on_nan` and `on_spike`."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def most_norm(self, state: TrainState, loss: float = 0.0) -> float:
        """The largest norm of a gradient that changes the weights after a step of this mean loss."""
        if self.config.on_spike == "report":
            return math.inf
        most_loss, most_norm = self._limits(state)
        return most_norm if loss <= most_loss else 0.0

    def _limits(self, state: TrainState) -> tuple[float, float]:
        """The largest loss and the largest norm that are no spike. Losses of preferences have no limit."""
        if state.updates < FIRST_UPDATES:
            return math.inf, math.inf
        most_loss = LOSS_FACTOR * state.loss_mean + LOSS_NATS if self.config.method == "sft" else math.inf
        return most_loss, NORM_FACTOR * state.norm_mean

    def spike(self, state: TrainState, loss: float, norm: float) -> str | None:
        """Describes a spike; None if there is none. `state`: before the step."""
        most_loss, most_norm = self._limits(state)
        if not math.isfinite(loss) or not math.isfinite(norm) or (loss <= most_loss and norm <= most_norm):
            return None
        return (
            f"its loss is {loss:.4g} and its gradient's norm {norm:.4g}, with running means of {state.loss_mean:.4g} "
            f"and {state.norm_mean:.4g}"
        )

    def counted(self, state: TrainState, report: StepReport) -> TrainState:
        """`state` with the running means after a step."""
        if report.skipped or not report.tokens:
            return state
        decay = DECAY if state.norm_mean else 0.0
        mean = lambda old, new: decay * old + (1 - decay) * new
        return replace(
            state, loss_mean=mean(state.loss_mean, report.loss), norm_mean=mean(state.norm_mean, report.grad_norm)
        )

    def goes_back(self, report: StepReport) -> bool:
        """True if the run goes back to the last checkpoint. Raises EngineError if the training stops."""
        if not report.tokens or (report.spike is None and not report.skipped):
            return False
        name = "on_nan" if report.spike is None else "on_spike"
        action = getattr(self.config, name)
        if action == "stop":
            raise EngineError(
                f"training ends at step {report.step} of {report.steps}, and no model is written: {report.reason} "
                f"({name} is stop)"
            )
        return action == "back"


class LostSteps:
    """Counts steps that could not learn: their losses or gradients are not finite, or their gradients are zero.

    Args:
        learning_rate: Named in the error.
        before: Lost steps of earlier runs of the same training.
    """

    def __init__(self, learning_rate: float, before: int = 0) -> None:
        self.learning_rate, self.count, self.in_a_row = learning_rate, before, 0

    def add(self, report: StepReport, updates: int) -> None:
        """Raises EngineError if too many steps are lost, or if the last one ends and `updates` is 0."""
        if report.step == report.steps and not updates:
            raise EngineError(
                f"none of the {report.steps} steps changed the model, and none is written: {report.reason}"
            )
        if not report.is_lost:
            self.in_a_row = 0 if report.tokens else self.in_a_row
            return
        self.count += 1
        self.in_a_row += 1
        if self.in_a_row >= MOST_IN_A_ROW or self.count > max(1, report.steps // MOST_PART):
            raise EngineError(
                f"training ends at step {report.step} of {report.steps}, and no model is written: {self.count} steps "
                f"were lost, {self.in_a_row} in a row ({report.reason}); lower learning_rate "
                f"({self.learning_rate:g}), and set another output_dir or resume from a checkpoint before the first of "
                "them"
            )
