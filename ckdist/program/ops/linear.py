"""linear, with several matrices on one input."""

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.lowered import MatrixKey
from ckdist.program.ops.elementwise import GATES, gate_number
from ckdist.program.ops.op import ServingLowering, TrainingLowering, lower, op, vjp
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Group, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr, Value
from ckdist.program.step import ABSENT, NO_SPAN, ValueIndex, VectorIndex


def infer_linear(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """One value per matrix, partial if its columns are sharded. Raises LayoutError if the input does not fit."""
    (x,) = inputs
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
    """Returns x @ w.T + bias for each (w, bias). If the input is sharded, only the first rank adds the bias."""
    (x,) = inputs
    count = len(weights) // 2
    results = []
    for w, bias, declared in zip(weights[:count], weights[count:], attrs["weights"][:count], strict=True):
        assert w is not None  # only biases are optional
        y = x @ w.T  # (tokens, out)
        if bias is not None and context.adds_bias(declared.dims[1]):
            y = y + bias
        results.append(y)
    return results


@lower("linear", "inference")
def lower_linear(lowering: ServingLowering, group: Group) -> None:
    """Emits one step for all matrices, with a following low-rank addition, gate, activation or soft cap.

    The steps that make their input come before it.
    """
    instr, low_rank, gated, cap = group.instr, group["low_rank"], group["gated"], group["soft_cap"]
    activate = group["activate"]
    x, in_dim = instr.inputs[0], instr.matrices[0].dims[1]
    columns = lowering.columns(x)
    summed = len(columns) > 1  # the matrix is read through shards of its columns
    adds_bias = in_dim.axis is None or lowering.mesh.index(in_dim.axis) == 0
    activations = [lowering.activations(x, w.name) for w in instr.matrices]
    low = {}
    if low_rank:
        from ckdist.program.ops.low_rank import lower_low_rank

        low = lower_low_rank(lowering, instr, low_rank)
    results = _results(lowering, group)
    products = []
    for w, bias, span, out in zip(
        instr.matrices, instr.weights[len(instr.weights) // 2 :], activations, results, strict=True
    ):
        pieces = columns if summed else lowering.pieces(w.dims[0])
        rows = (0, w.dims[0].elements)
        vector = lowering.vector(bias) if summed else lowering.shard_vectors(bias, pieces)
        added = low.get(w.name)
        products.append(
            {
                "x": span,
                "out": out,
                "weight": lowering.matrix(
                    [MatrixKey(w.name, *((rows, piece) if summed else (piece, columns[0]))) for piece in pieces]
                ),
                "bias": vector if adds_bias else VectorIndex(ABSENT),
                "low": added.values if added else NO_SPAN,
                "low_weight": added.matrices(lowering, [rows] if summed else pieces) if added else NO_SPAN,
            }
        )
    lowering.emit(
        "linear",
        lowering.rows_of(x),
        count=len(products),
        products=products,
        summed=summed,
        gate=gate_number(gated.attrs["function"], gated.attrs.get("limit", 0.0)) if gated else GATES["none"],
        gate_factor=gated.attrs.get("gate_scale", 1.0) if gated else 1.0,
        activation=GATES[activate.attrs["function"] if activate else "none"],
        soft_cap=cap.attrs["cap"] if cap else 0.0,
        adapters=low_rank.attrs.get("slots", False) if low_rank else False,
    )


def _results(lowering: ServingLowering, group: Group) -> list[ValueIndex]:
    """The buffers of the products. The linear's values and those of the rest of the group share them."""
    instr, low_rank = group.instr, group["low_rank"]
    adapted = dict(zip((v.name for v in low_rank.inputs[1:]), low_rank.outputs, strict=True)) if low_rank else {}
    values = [adapted.get(v.name, v) for v in instr.outputs]
    follows = group["gated"] or group["soft_cap"] or group["activate"]
    last = follows.outputs[0] if follows else values[0]
    reader = lowering.graph.reader(last)
    # Ranks write logits to the memory of rank 0. A gather of sharded tokens copies other values as well.
    if reader is None or (reader.op == "all_gather" and not last.dims[0].axis):
        dim = values[0].dims[-1]
        results = [lowering.buffer("logits", dim.local(lowering.mesh), offset=dim.share(lowering.mesh)[0])]
    else:
        results = lowering.results(values)
    for value, plain, out in zip(values, instr.outputs, results, strict=True):
        lowering.at[value.name] = lowering.at[plain.name] = out
    lowering.at[last.name] = results[0]
    return results


@lower("linear", "training")
def lower_matmul(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step for all matrices. If the results are partial, only the first rank adds the biases."""
    x, in_dim = lowering.operand(instr.inputs[0]), instr.matrices[0].dims[1]
    biases = instr.weights[len(instr.weights) // 2 :]
    if in_dim.axis is not None and lowering.mesh.index(in_dim.axis):
        biases = (None,) * len(biases)
    products = [
        {
            "pack": lowering.pack(False, w),
            "out": lowering.output(out),
            "bias": lowering.parameter(bias),
            "residual": lowering.residual(out),
        }
        for w, bias, out in zip(instr.matrices, biases, instr.outputs, strict=True)
    ]
    lowering.emit("matmul", x=x, count=len(products), products=products)


@vjp("linear")
def linear_vjp(g: Emitter, instr: Instr, grads: Gradients, wanted: list[bool]) -> Gradients:
    """At most three instructions, for the gradients of the input, of matrices and of biases."""
    count = len(instr.weights) // 2
    outputs = {i: gradient for i, gradient in enumerate(grads) if gradient is not None}
    results: Gradients = [None] * len(wanted)  # gradients of x, the matrices, the biases

    def emit(op: str, first: tuple[Value, ...], begin: int) -> None:
        """One instruction for the wanted gradients of the weights that start at operand `begin`."""
        wants = [i for i in outputs if wanted[begin + i]]
        if wants:
            names = [f"d_{instr.weight(begin - 1 + i).name}" for i in wants]
            emitted = g.emit(op, (*first, *(outputs[i] for i in wants)), names=names)
            for i, gradient in zip(wants, emitted, strict=True):
                results[begin + i] = gradient

    emit("linear_weight_grad", instr.inputs, 1)
    emit("bias_grad", (), 1 + count)
    if wanted[0]:
        results[0] = _input_gradient(g, instr, outputs)
    return results


def _input_gradient(g: Emitter, instr: Instr, outputs: dict[int, Value]) -> Value:
    """The gradient of the input, from those of the outputs.

    One instruction, unless the rows of only some matrices are sharded: then one for each axis, and their sum.
    """
    by_axis: dict[str | None, list[int]] = {}
    for i in outputs:
        by_axis.setdefault(instr.weight(i).dims[0].axis, []).append(i)
    parts = []
    for some in by_axis.values():
        operands = tuple(outputs[i] for i in some), tuple(instr.weight(i) for i in some)
        parts += g.emit("linear_grad", *operands, ["d_linear"])
    total, *more = parts if len(parts) == 1 else [g.whole(part) for part in parts]
    for part in more:
        (total,) = g.emit("add", (total, part), names=["d_linear"])
    return total
