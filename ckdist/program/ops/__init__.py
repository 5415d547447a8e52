"""The ops, one file per op or per group of related ops.

- `infer` computes dimensions and placement of the results: which are sharded, which are partial. It raises LayoutError
  if the forward lacks a collective.
- `reference` defines the op in numpy on the arrays of one rank. A collective gets the arrays of all ranks.
- `vjp` emits the gradients of an op's operands. Gradients are ops like the others.
- `lower` emits the steps that the executor runs.
"""

import importlib
import pkgutil

from ckdist.program.ops.op import OPS, Op

TRAINING = ("balance_loss", "experts_grad", "loss")  # a rank that serves does not import them

for _module in pkgutil.iter_modules(__path__):  # each file in this folder registers its ops
    if _module.name not in TRAINING:
        importlib.import_module(f"{__name__}.{_module.name}")


def register_training_ops() -> None:
    """Imports the ops that only training has."""
    for name in TRAINING:
        importlib.import_module(f"{__name__}.{name}")


__all__ = ["OPS", "Op", "register_training_ops"]
