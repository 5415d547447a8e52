"""low_rank: adds the product with LoRA's matrices (Hu et al. 2021, arXiv:2106.09685) to a linear; and its gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ckdist import native
from ckdist.errors import LayoutError
from ckdist.layout import Range
from ckdist.program.lowered import RANK_UNIT, MatrixKey
from ckdist.program.ops.elementwise import GATES
from ckdist.program.ops.op import ServingLowering, TrainingLowering, axes, lower, op, vjp, whole
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr, Value, Weight
from ckdist.program.step import ABSENT, NO_SPAN, ParameterIndex, Span, ValueIndex, VectorIndex

Item = TypeVar("Item")

MOST_ADAPTERS: int = native.lib.ckdist_most_adapters  # of a sequence


def _parts(inputs: Sequence[Item], attrs: Attrs) -> tuple[Item, Sequence[Item], Sequence[Item]]:
    """x, the values that it adds to, and the keys of dropout, if there are any."""
    last = len(inputs) - ("dropout" in attrs)
    return inputs[0], inputs[1:last], inputs[last:]


def infer_low_rank(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the values that it adds to. Raises LayoutError if A and B do not fit them."""
    x, ys, _ = _parts(inputs, attrs)
    whole("low_rank", x)
    for y, a, b in zip(ys, weights[::2], weights[1::2], strict=True):
        if (a.dims[1], a.dims[0], b.dims[0]) != (x.dims[-1], b.dims[1], y.dims[-1]):
            raise LayoutError(
                f"low_rank: {a} and {b} do not lead from [{x.dims[-1]}] of %{x.name} to [{y.dims[-1]}] of %{y.name}"
            )
        if axes(a.dims[1].axis) != y.partial:
            raise LayoutError(
                f"low_rank adds a value that is partial over {a.dims[1].axis} to %{y.name}, "
                f"which is partial over {' and '.join(y.partial) or 'nothing'}"
            )
    return [(y.dims, y.partial) for y in ys]


@op("low_rank", infer_low_rank, takes_partial=True)
def low_rank(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns y + scale * (x @ a.T) @ b.T for each result y of a linear. arXiv:2106.09685.

    If x is sharded, both summands are partial. With keys of dropout, each A reads x with a mask of its own.
    """
    x, ys, keys = _parts(inputs, attrs)
    pairs = zip(ys, weights[::2], weights[1::2], strict=True)
    reads = [x] * len(ys)
    if keys:
        from ckdist.program.ops.dropout import dropped, stream_of

        matrices = attrs["weights"][::2]
        mask = {"probability": attrs["dropout"]}
        first = matrices[0].dims[1].span(context.mesh)[0]
        reads = [dropped(x, keys[0], mask | {"stream": stream_of(a.name)}, first) for a in matrices]
    return [y + np.float32(attrs["scale"]) * ((x @ a.T) @ b.T) for x, (y, a, b) in zip(reads, pairs, strict=True)]


@vjp("low_rank")
def low_rank_vjp(g: Emitter, instr: Instr, grads: Gradients, wanted: list[bool]) -> Gradients:
    """Emits the gradients of the linears and scales that it consists of. The gradients of the values are passed on.

    x A is computed again, which is cheap.
    """
    x, count, scale = instr.inputs[0], len(instr.outputs), instr.attrs["scale"]
    results: Gradients = [None] * len(wanted)  # gradients of x, the values (and keys), then A, B, A, B, ...
    for m in reversed(range(count)):
        dy = grads[m]
        if dy is None:
            continue
        (a, of_a), (b, of_b) = ((instr.weight(at), len(instr.inputs) + at) for at in (2 * m, 2 * m + 1))
        results[1 + m] = dy
        dropped = lambda value, a=a: _dropped(g, value, a, instr)
        read = dropped(x) if wanted[of_a] or wanted[of_b] else x
        if wanted[of_b]:
            (low,) = g.emit("linear", (read,), (a, None), ["lora_a"])
            (low,) = g.emit("scale", (g.whole(low),), factor=scale)
            (results[of_b],) = g.emit("linear_weight_grad", (low, dy), names=[f"d_{b.name}"])
        (d_low,) = g.emit("linear_grad", (dy,), (b,), ["d_linear"])
        (d_low,) = g.emit("scale", (g.whole(d_low),), names=["d_scale"], factor=scale)
        if wanted[of_a]:
            (results[of_a],) = g.emit("linear_weight_grad", (read, d_low), names=[f"d_{a.name}"])
        if wanted[0]:
            dx = dropped(g.emit("linear_grad", (d_low,), (a,), ["d_linear"])[0])
            results[0] = dx if results[0] is None else g.emit("add", (results[0], dx), names=["d_linear"])[0]
    return results


def _dropped(g: Emitter, value: Value, a: Weight, instr: Instr) -> Value:
    """`value` with the mask of the input of A; the value itself without dropout."""
    _, _, keys = _parts(instr.inputs, instr.attrs)
    if not keys:
        return value
    from ckdist.program.ops.dropout import stream_of

    mask = {"probability": instr.attrs["dropout"], "stream": stream_of(a.name), "columns": a.dims[1]}
    return g.emit("dropout", (value, *keys), names=["dropped"], **mask)[0]


@lower("low_rank", "training")
def lower_training_low_rank(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits three steps per value: the product x A, its scale, and the product with B, which adds the value."""
    given, values, keys = _parts(instr.inputs, instr.attrs)
    x = lowering.place_of(given) if keys else lowering.operand(given)
    for m, (value, out) in enumerate(zip(values, instr.outputs, strict=True)):
        a, b = instr.weight(2 * m), instr.weight(2 * m + 1)
        read = _masked(lowering, x, a, instr.attrs["dropout"]) if keys else x
        low, scaled = (lowering.alone(a.dims[0].elements, lowering.operand_bytes == 4) for _ in range(2))
        _product(lowering, read, a, low, ValueIndex(ABSENT))
        lowering.emit("scale", x=low, out=scaled, factor=instr.attrs["scale"])
        _product(lowering, lowering.converted(scaled), b, lowering.output(out), lowering.place_of(value))


def _masked(lowering: TrainingLowering, x: ValueIndex, a: Weight, probability: float) -> ValueIndex:
    """Emits a step that drops elements of x. Returns the result, an operand."""
    from ckdist.program.ops.dropout import step_fields, stream_of

    made = lowering.like(x, place="activations")
    fields = step_fields(probability, stream_of(a.name), a.dims[1], lowering.mesh)
    lowering.emit("dropout", x=x, out=made, **fields)
    return made


def _product(lowering: TrainingLowering, x: ValueIndex, weight: Weight, out: ValueIndex, residual: ValueIndex) -> None:
    """Emits a step out = x @ weight.T + residual."""
    product = {"pack": lowering.pack(False, weight), "out": out, "bias": ParameterIndex(ABSENT), "residual": residual}
    lowering.emit("matmul", x=x, count=1, products=[product])


@dataclass(frozen=True)
class Low:
    """The intermediate x A of y + x A B: `values` has one buffer for each shard of x's columns."""

    values: Span
    b: Weight
    slots: int

    def matrices(self, lowering: ServingLowering, rows: list[Range]) -> Span:
        """The shards of B, with the row ranges of the linear's matrix. With slots, those of each slot in turn."""
        columns = (0, padded(self.b.dims[1].elements))
        return lowering.matrix(
            [MatrixKey(self.b.name, part, columns, slot) for slot in slot_ranges(self.slots) for part in rows]
        )


def lower_low_rank(lowering: ServingLowering, linear: Instr, instr: Instr) -> dict[str, Low]:
    """Emits one step for all A. The linear's step multiplies the results with B. Returns them by weight name."""
    x, count = instr.inputs[0], len(instr.outputs)
    slots = instr.attrs.get("slots", 0)
    weights = [instr.weight(index) for index in range(2 * count)]
    of = {v.name: w.name for v, w in zip(linear.outputs, linear.matrices, strict=True)}
    columns, products, found = lowering.columns(x), [], {}
    for value, a, b in zip(instr.inputs[1:], weights[::2], weights[1::2], strict=True):
        rows = padded(a.dims[0].elements)
        spans = lowering.activations(x, a.name).indices()
        width = rows * most_adapters(slots)
        lows = [lowering.buffer("arena", width, rows=lowering.most_rows(x), selected=x.selected) for _ in columns]
        for span, low, part in zip(spans, lows, columns, strict=True):
            products.append(
                {
                    "x": Span(span, 1),
                    "out": low,
                    "weight": lowering.matrix(
                        [MatrixKey(a.name, (0, rows), part, slot) for slot in slot_ranges(slots)]
                    ),
                    "bias": VectorIndex(ABSENT),
                    "low": NO_SPAN,
                    "low_weight": NO_SPAN,
                }
            )
        found[of[value.name]] = Low(Span(lows[0], len(lows)), b, slots)
    if slots:
        lowering.emit("adapt", lowering.rows_of(x), count=len(products), products=products)
        return found
    lowering.emit(
        "linear",
        lowering.rows_of(x),
        count=len(products),
        products=products,
        summed=False,
        gate=GATES["none"],
        activation=GATES["none"],
        gate_factor=1.0,
        soft_cap=0.0,
        adapters=False,
    )
    return found


def slot_ranges(slots: int) -> list[Range | None]:
    """`MatrixKey.matrices` of each slot; [None] if one adapter is for all rows."""
    return [(slot, slot + 1) for slot in range(slots)] or [None]


def most_adapters(slots: int) -> int:
    """Most adapters of a sequence: each has a place in a row of x A."""
    return max(1, min(slots, MOST_ADAPTERS))


def padded(rank: int) -> int:
    """`rank` rounded up to a multiple of RANK_UNIT. The rest is zeros."""
    return -(-rank // RANK_UNIT) * RANK_UNIT
