"""linear with several matrices over one input, its three gradients (of the input, of the matrices, of the biases),
and what low ranks add to it.
"""

from typing import TYPE_CHECKING

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.ops.op import Arrays, Attrs, Gradients, Inferred, Values, Weights, op, total, vjp, whole
from ckdist.program.program import Instr, Value
from ckdist.program.rank_context import RankContext

if TYPE_CHECKING:  # which imports the ops
    from ckdist.program.emitter import Emitter


def infer_linear(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """A value for each matrix, partial where its columns are sharded; LayoutError where the input does not fit."""
    (x,) = inputs
    whole("linear", x)
    matrices = weights[: len(weights) // 2]
    outputs: Inferred = []
    for w in matrices:
        out_dim, in_dim = w.dims
        if in_dim != x.dims[-1]:
            raise LayoutError(f"linear: %{x.name} ends in [{x.dims[-1]}], {w} reads [{in_dim}]")
        outputs.append(((*x.dims[:-1], out_dim), in_dim.axis))
    return outputs


@op("linear", infer_linear)
def linear(context: RankContext, inputs: Arrays, weights: list[np.ndarray | None], attrs: Attrs) -> Arrays:
    """X @ w.T + bias for each (w, bias).

    Where the input is sharded, the result is partial and the first rank adds the bias.
    """
    (x,) = inputs
    count = len(weights) // 2
    results = []
    for w, bias, declared in zip(weights[:count], weights[count:], attrs["weights"][:count], strict=True):
        assert w is not None  # a bias may be absent, a matrix is not
        y = x @ w.T  # (tokens, out)
        if bias is not None and context.adds_bias(declared.dims[1]):
            y = y + bias
        results.append(y)
    return results


@vjp("linear")
def linear_vjp(g: "Emitter", instr: Instr, grads: Gradients, wanted: list[bool]) -> Gradients:
    """At most three instructions, for the gradients of the input, of matrices and of biases."""
    count = len(instr.weights) // 2
    outputs = {i: gradient for i, gradient in enumerate(grads) if gradient is not None}
    results: Gradients = [None] * len(wanted)  # of x, the matrices, the biases

    def emit(op: str, first: tuple[Value, ...], begin: int) -> None:
        """One instruction for the wanted ones of the weights whose operands start at `begin`."""
        wants = [i for i in outputs if wanted[begin + i]]
        if wants:
            names = [f"d_{instr.weight(begin - 1 + i).name}" for i in wants]
            emitted = g.emit(op, (*first, *(outputs[i] for i in wants)), names=names)
            for i, gradient in zip(wants, emitted, strict=True):
                results[begin + i] = gradient

    emit("linear_weight_grad", instr.inputs, 1)
    emit("bias_grad", (), 1 + count)
    if wanted[0]:
        (results[0],) = g.emit(
            "linear_grad", tuple(outputs.values()), tuple(instr.weight(i) for i in outputs), ["d_linear"]
        )
    return results


def infer_linear_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """As the input, partial where the rows of the matrices are sharded; LayoutError where a gradient does not fit."""
    whole("linear_grad", *inputs)
    for dy, w in zip(inputs, weights, strict=True):
        if dy.dims[-1] != w.dims[0]:
            raise LayoutError(f"linear_grad: %{dy.name} ends in [{dy.dims[-1]}], {w} writes [{w.dims[0]}]")
    return [((*inputs[0].dims[:-1], weights[0].dims[1]), weights[0].dims[0].axis)]


@op("linear_grad", infer_linear_grad)
def linear_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Dx = sum of dy @ w over the matrices; partial where the outputs are sharded."""
    return [total(dy @ w for dy, w in zip(inputs, weights, strict=True))]


def infer_linear_weight_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """As each matrix, partial where tokens are sharded."""
    x, *dys = inputs
    whole("linear_weight_grad", *inputs)
    return [((dy.dims[-1], x.dims[-1]), x.dims[0].axis) for dy in dys]


@op("linear_weight_grad", infer_linear_weight_grad)
def linear_weight_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Dw = dy.T @ x, (out, in), for each dy; partial where the tokens are sharded."""
    x, *dys = inputs
    return [dy.T @ x for dy in dys]


def infer_bias_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """As each bias, partial where tokens are sharded."""
    whole("bias_grad", *inputs)
    return [((dy.dims[-1],), dy.dims[0].axis) for dy in inputs]


@op("bias_grad", infer_bias_grad)
def bias_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The sum over the tokens of each dy."""
    return [dy.sum(axis=0) for dy in inputs]


def infer_low_rank(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """As the values that it adds to; LayoutError where A and B do not lead there."""
    x, *ys = inputs
    whole("low_rank", x)
    for y, a, b in zip(ys, weights[: len(ys)], weights[len(ys) :], strict=True):
        if (a.dims[1], a.dims[0], b.dims[0]) != (x.dims[-1], b.dims[1], y.dims[-1]):
            raise LayoutError(
                f"low_rank: {a} and {b} do not lead from [{x.dims[-1]}] of %{x.name} to [{y.dims[-1]}] of %{y.name}"
            )
        if a.dims[1].axis != y.partial:
            raise LayoutError(
                f"low_rank adds what is partial over {a.dims[1].axis} to %{y.name}, which is partial over {y.partial}"
            )
    return [(y.dims, y.partial) for y in ys]


@op("low_rank", infer_low_rank)
def low_rank(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Y + scale * (x @ a.T) @ b.T for each y: LoRA beside a linear of x.

    Where x is sharded, it adds a part to a part. arXiv:2106.09685.
    """
    x, *ys = inputs
    pairs = zip(ys, weights[: len(ys)], weights[len(ys) :], strict=True)
    return [y + np.float32(attrs["scale"]) * ((x @ a.T) @ b.T) for y, a, b in pairs]
