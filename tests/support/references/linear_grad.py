"""The definitions in numpy of the ops in `ckdist/program/ops/linear_grad.py`."""

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference, total


@reference("linear_grad")
def linear_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The sum of dy @ w over the matrices. Partial if the outputs are sharded."""
    return [total(dy @ w for dy, w in zip(inputs, weights, strict=True))]


@reference("linear_weight_grad")
def linear_weight_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns dy.T @ x, (out, in), for each dy. Partial if tokens are sharded."""
    x, *dys = inputs
    return [dy.T @ x for dy in dys]


@reference("bias_grad")
def bias_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Sums each dy over the tokens."""
    return [dy.sum(axis=0) for dy in inputs]
