"""Ends a training whose losses or gradients are not finite, or whose gradients are zero."""

from ckdist.errors import EngineError
from ckdist.train.report import StepReport

MOST_IN_A_ROW = 10
MOST_PART = 10  # at most one in MOST_PART of all steps may be lost; a single one always may


class LostSteps:
    """Counts steps that could not learn.

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
