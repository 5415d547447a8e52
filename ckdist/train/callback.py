"""Callbacks of `ckdist.train`."""

from collections.abc import Callable
from pathlib import Path

from ckdist.train.report import StepReport


class Callback:
    """A base class for callbacks: a subclass overrides some methods.

    All ranks call them. An exception ends the training on all ranks, with its text.
    """

    def on_step(self, report: StepReport) -> None:
        """Called after every step."""

    def on_checkpoint(self, path: Path, step: int) -> None:
        """Called when the checkpoint of `step` is complete. This may be some steps later."""

    def on_end(self, report: StepReport | None) -> None:
        """Called after the model was written, with the last step's report, or None if no step was left."""


class StepFunction(Callback):
    """Calls one function after every step."""

    def __init__(self, function: Callable[[StepReport], None]) -> None:
        self.function = function

    def on_step(self, report: StepReport) -> None:
        """Calls it."""
        self.function(report)
