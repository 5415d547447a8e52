"""The ops, a file each or one for those that belong together: what each infers from its operands' dimensions, its
definition in numpy, its gradient, and its steps.

`infer` holds the placement rules: it says where a result is sharded or partial, and refuses what would need a
collective that the forward did not write. `reference` is the op's meaning on one rank's arrays; collectives get every
rank's. Gradients are ops like the others: `vjp` says which of them go back through an op. `lower` emits the steps that
the executor runs.
"""

import importlib
import pkgutil

from ckdist.program.ops.op import OPS, Op

for _module in pkgutil.iter_modules(__path__):  # every file of this folder registers its ops
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["OPS", "Op"]
