"""The learning rate of every step: a warm-up, then constant, linear, cosine, or a plateau with a final decay (WSD).

WSD: Hu et al. 2024, arXiv:2404.06395. The rate depends only on the step, so there is no state to save.
"""

import math
from dataclasses import dataclass

from ckdist.train.config import TrainConfig


@dataclass(frozen=True)
class Schedule:
    """`rate(step)` for steps 0 to steps - 1, as a configuration says."""

    config: TrainConfig
    steps: int

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up."""
        return self.config.warmup_steps or math.ceil(self.config.warmup_ratio * self.steps)

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        peak, least = self.config.learning_rate, self.config.min_lr_ratio
        if step < self.warmup_steps:
            return peak * (step + 1) / self.warmup_steps
        return peak * (least + (1 - least) * self._height(step))

    def _height(self, step: int) -> float:
        """Falls from 1 to 0."""
        kind, begin = self.config.lr_scheduler_type, self.warmup_steps
        if kind == "constant":
            return 1.0
        if kind == "wsd":
            begin = max(begin, self.steps - (self.config.num_decay_steps or max(1, self.steps // 10)))
        progress = min(1.0, max(0.0, (step - begin) / max(1, self.steps - begin)))
        return 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1.0 - progress
