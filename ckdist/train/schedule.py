"""The learning rate of every step: a warm-up, then constant, linear, cosine, or a plateau with a final decay (WSD).

WSD: Hu et al. 2024, arXiv:2404.06395. The rate depends only on the step, so there is no state to save.
"""

import math
from dataclasses import dataclass

from ckdist.train.config import TrainConfig


@dataclass(frozen=True)
class Schedule:
    """`rate(step)` for steps 0 to steps - 1. Only wsd uses `decay_steps`."""

    kind: str  # constant, linear, cosine, wsd
    peak: float
    steps: int
    warmup_steps: int = 0
    decay_steps: int = 0
    min_ratio: float = 0.0

    @classmethod
    def of(cls, config: TrainConfig, steps: int) -> "Schedule":
        """The schedule of a training of `steps` steps."""
        warmup = config.warmup_steps or math.ceil(config.warmup_ratio * steps)
        return cls(
            config.lr_scheduler_type,
            config.learning_rate,
            steps,
            warmup,
            config.num_decay_steps or max(1, steps // 10),
            config.min_lr_ratio,
        )

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * self._height(step))

    def _height(self, step: int) -> float:
        """Falls from 1 to 0."""
        if self.kind == "constant":
            return 1.0
        begin = max(self.warmup_steps, self.steps - self.decay_steps) if self.kind == "wsd" else self.warmup_steps
        progress = min(1.0, max(0.0, (step - begin) / max(1, self.steps - begin)))
        return 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1.0 - progress
