"""The ops: what each infers from its operands' dimensions, its definition in numpy, and its gradient.

`infer` holds the placement rules: it says where a result is sharded or partial, and refuses what would need a
collective that the forward did not write. `reference` is the op's meaning on one rank's arrays; collectives get every
rank's. Gradients are ops like the others: `vjp` says which of them go back through an op.
"""

from ckdist.program.ops import attention, collectives, elementwise, embedding, linear, loss, norm
from ckdist.program.ops.op import OPS, Op

__all__ = ["OPS", "Op", "attention", "collectives", "elementwise", "embedding", "linear", "loss", "norm"]
