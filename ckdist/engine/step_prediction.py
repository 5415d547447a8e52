"""What steps are predicted to take, beside what they took: for metrics, so that errors of plans show.

Of every few steps the last with prompts and the last without are kept, and priced when somebody asks.
"""

import logging
from dataclasses import dataclass, field

from ckdist.engine.scheduler import Step
from ckdist.planning.cost import CostModel
from ckdist.planning.machine import MEASURED
from ckdist.planning.step_shape import Chunks, StepShape

log = logging.getLogger(__name__)

EVERY = 8  # steps, of which one is kept: between steps the caches hold weights
KINDS = "decode", "prompt"
PROMPT = 512


@dataclass
class StepPrediction:
    """Prices steps with `cost`, this rank's. A program without stages."""

    cost: CostModel
    _steps: int = 0
    _last: dict[str, tuple[StepShape, float]] = field(default_factory=dict)

    def note(self, step: Step, seconds: float) -> None:
        """A step is done."""
        self._steps += 1
        if self._steps % EVERY and len(self._last) == len(KINDS):
            return
        chunks = tuple(Chunks(1, chunk.tokens, chunk.first) for chunk in step.chunks)
        shape = StepShape(chunks, max(1, sum(chunk.rows for chunk in step.chunks)))
        self._last[KINDS[shape.tokens > shape.sequences]] = shape, seconds

    def stats(self) -> dict[str, float | str]:
        """Measured and predicted seconds of the last step of each kind that was kept."""
        found: dict[str, float | str] = {}
        for kind, (shape, seconds) in self._last.items():
            found[f"step_{kind}_measured_seconds"] = seconds
            found[f"step_{kind}_predicted_seconds"] = self.cost.step(shape).total
        return found

    def tell(self, context: int) -> None:
        """Logs what is predicted for one sequence."""
        decode = 1 / self.cost.step(StepShape.decode(1, context)).total
        prefill = PROMPT / self.cost.step(StepShape.prompt(PROMPT)).total
        machine = self.cost.machine
        figures = "nominal figures" if machine.source != MEASURED else f"what was measured of {machine.name}"
        log.debug(
            "predicted by %s: %.3g tokens/s of one sequence behind %d others, %.4g of a prompt of %d",
            figures, decode, context, prefill, PROMPT,
        )  # fmt: skip


__all__ = ["StepPrediction"]
