"""Predicted step times next to measured ones, as metrics, so that errors of plans show.

One of EVERY steps is kept: the last one with prompts and the last one without. Both are priced when the statistics are
read.
"""

import logging
from dataclasses import dataclass, field

from ckdist.engine.step_builder import Step
from ckdist.planning.cost import CostModel
from ckdist.planning.machine_spec import MEASURED
from ckdist.planning.step_shape import Chunks, StepShape

log = logging.getLogger(__name__)

EVERY = 8  # one of this many steps is kept, since work between steps evicts weights from the caches
KINDS = "decode", "prompt"
PROMPT = 512


@dataclass
class StepPrediction:
    """Prices this rank's steps with `cost`. The program must not have stages."""

    cost: CostModel
    _steps: int = 0
    _last: dict[str, tuple[StepShape, float]] = field(default_factory=dict)

    def note(self, step: Step, seconds: float) -> None:
        """Records a step that took `seconds`."""
        self._steps += 1
        if self._steps % EVERY and len(self._last) == len(KINDS):
            return
        chunks = tuple(Chunks(1, chunk.tokens, chunk.first) for chunk in step.chunks)
        shape = StepShape(chunks, max(1, sum(chunk.rows for chunk in step.chunks)))
        self._last[KINDS[shape.tokens > shape.sequences]] = shape, seconds

    def stats(self) -> dict[str, float | str]:
        """Measured and predicted seconds of the last kept step of each kind."""
        found: dict[str, float | str] = {}
        for kind, (shape, seconds) in self._last.items():
            found[f"step_{kind}_measured_seconds"] = seconds
            found[f"step_{kind}_predicted_seconds"] = self.cost.step(shape).total
        return found

    def tell(self, context: int) -> None:
        """Logs the predicted speeds of one sequence."""
        decode = 1 / self.cost.step(StepShape.decode(1, context)).total
        prefill = PROMPT / self.cost.step(StepShape.prompt(PROMPT)).total
        machine = self.cost.machine
        figures = "nominal figures" if machine.source != MEASURED else f"measurements of {machine.name}"
        log.debug(
            "predicted from %s: %.3g tokens/s of decoding after %d tokens, %.4g tokens/s of prefill of %d tokens",
            figures, decode, context, prefill, PROMPT,
        )  # fmt: skip


__all__ = ["StepPrediction"]
