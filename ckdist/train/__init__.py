"""Training: batches, the optimizer, checkpoints and the loop around a program that gives a loss and its gradients.

>>> import ckdist
>>> ckdist.train(ckdist.TrainConfig(output_dir="out", train_file=("notes.txt",), model_name_or_path="model"))
"""

import sys
import types


class _Training(types.ModuleType):
    """The package, which is called as what it does: `ckdist.train(config)` is `ckdist.train.trainer.train(config)`."""

    def __call__(self, config, on_step=None, batches=None):
        from ckdist.train.trainer import train

        return train(config, on_step, batches)


sys.modules[__name__].__class__ = _Training
