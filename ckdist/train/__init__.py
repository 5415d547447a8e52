"""Training: batches, the optimizer, checkpoints and the loop around a program that computes a loss and its gradients.

>>> import ckdist
>>> ckdist.train(ckdist.TrainConfig(output_dir="out", train_file=("notes.txt",), model_name_or_path="model"))
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckdist.train.batch_source import BatchSource
    from ckdist.train.callback import Callback
    from ckdist.train.config import TrainConfig
    from ckdist.train.report import StepReport


class _Training(types.ModuleType):
    """The package as a function: `ckdist.train(config)` calls `ckdist.train.trainer.train(config)`."""

    def __call__(
        self,
        config: TrainConfig,
        on_step: Callable[[StepReport], None] | None = None,
        batches: BatchSource | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> StepReport | None:
        """Calls `ckdist.train.trainer.train`."""
        from ckdist.train.trainer import train

        return train(config, on_step, batches, callbacks=callbacks)


sys.modules[__name__].__class__ = _Training
