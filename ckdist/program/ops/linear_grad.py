"""The gradients of linear, of its input, its matrices and its biases; and of the table of embed."""

from typing import Any

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.ops.op import TrainingLowering, lower, op, total
from ckdist.program.ops.op_types import Arrays, Attrs, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr
from ckdist.program.step import ValueIndex


def infer_linear_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the input, partial if the rows are sharded. Raises LayoutError if a gradient does not fit."""
    for dy, w in zip(inputs, weights, strict=True):
        if dy.dims[-1] != w.dims[0]:
            raise LayoutError(f"linear_grad: %{dy.name} ends in [{dy.dims[-1]}], {w} writes [{w.dims[0]}]")
    if len({w.dims[0].axis for w in weights}) > 1:
        raise LayoutError(f"linear_grad needs rows sharded over the same axis: {', '.join(map(str, weights))}")
    return [((*inputs[0].dims[:-1], weights[0].dims[1]), weights[0].dims[0].axis)]


@op("linear_grad", infer_linear_grad)
def linear_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The sum of dy @ w over the matrices. Partial if the outputs are sharded."""
    return [total(dy @ w for dy, w in zip(inputs, weights, strict=True))]


@lower("linear_grad", "training")
def lower_linear_grad(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step. Gradients that do not lie side by side are copied first."""
    dy = lowering.side_by_side(instr.inputs)
    weights = [instr.weight(n) for n in range(len(instr.weights))]
    dx = lowering.output(instr.outputs[0])
    lowering.emit("matmul_grad", count=len(dy), dy=dy, pack=lowering.pack(True, *weights), dx=dx)


def infer_linear_weight_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of each matrix, partial if tokens are sharded."""
    x, *dys = inputs
    return [((dy.dims[-1], x.dims[-1]), x.dims[0].axis) for dy in dys]


@op("linear_weight_grad", infer_linear_weight_grad)
def linear_weight_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns dy.T @ x, (out, in), for each dy. Partial if tokens are sharded."""
    x, *dys = inputs
    return [dy.T @ x for dy in dys]


@lower("linear_weight_grad", "training")
def lower_weight_grad(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step, which adds to the gradients of the weights."""
    x, *dys = map(lowering.operand, instr.inputs)
    lowering.emit("weight_grad", x=x, count=len(dys), gradients=_gradients(lowering, instr, dys))


def _gradients(lowering: TrainingLowering, instr: Instr, dys: list[ValueIndex]) -> list[dict[str, Any]]:
    """The target gradient of each dy."""
    return [
        {"dy": dy, "gradient": lowering.gradient(out), "fresh": lowering.is_fresh(out)}
        for dy, out in zip(dys, instr.outputs, strict=True)
    ]


def infer_bias_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of each bias, partial if tokens are sharded."""
    return [((dy.dims[-1],), dy.dims[0].axis) for dy in inputs]


@op("bias_grad", infer_bias_grad)
def bias_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Sums each dy over the tokens."""
    return [dy.sum(axis=0) for dy in inputs]


@lower("bias_grad", "training")
def lower_bias_grad(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step, which adds to the gradients of the biases."""
    dys = [lowering.place_of(v) for v in instr.inputs]
    lowering.emit("bias_grad", count=len(dys), gradients=_gradients(lowering, instr, dys))


def infer_embed_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the table, partial if tokens are sharded."""
    ids, dy = inputs
    return [((attrs["vocab"], dy.dims[-1]), ids.dims[0].axis)]


@op("embed_grad", infer_embed_grad)
def embed_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Adds the row of each token to the row of its id, in token order, for ids in the rank's shard."""
    ids, dy = inputs
    begin, end = context.share(attrs["vocab"])
    mine = (ids >= begin) & (ids < end)
    table = np.zeros((end - begin, dy.shape[1]), dy.dtype)  # (vocab, hidden)
    np.add.at(table, ids[mine] - begin, dy[mine])
    return [table]


@lower("embed_grad", "training")
def lower_embed_grad(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step, which adds to the gradient of the table."""
    first, _ = instr.attrs["vocab"].span(lowering.mesh)
    dy = lowering.place_of(instr.inputs[1])
    lowering.emit("embed_grad", dy=dy, gradient=lowering.added(instr.outputs[0]), first_row=first)
