"""Mixture of experts in training: the gradient of route, grouped_experts with its gradient, and switched.

grouped_experts keeps the values that its gradient reads. switched scales the shared expert's output. The selection of
experts has no gradient: gradients flow through the shares and through the outputs of the experts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.ops.elementwise import GATES, gated
from ckdist.program.ops.elementwise_grad import gated_grad
from ckdist.program.ops.experts import DOWN, infer_experts, routing, scores_of, split_weights
from ckdist.program.ops.op import TrainingLowering, lower, op, summed_over, vjp, whole
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr, Value, Weight
from ckdist.program.step import ABSENT, GradientIndex, ValueIndex

STACKS = ("gate", "up", "down")


def infer_route_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the logits."""
    return [(inputs[2].dims, None)]


@op("route_grad", infer_route_grad)
def route_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The gradient of the logits. Shares are w = scale * s / sum(s), or w = scale * s, of the chosen scores s."""
    chosen, d_shares, logits = inputs
    scores = scores_of(logits, attrs["scores"])
    s, dw = np.take_along_axis(scores, chosen, axis=-1), d_shares * np.float32(attrs["scale"])
    if attrs["renormalise"]:
        total = s.sum(axis=-1, keepdims=True) + np.float32(1e-20)
        dw = (dw - (dw * s).sum(axis=-1, keepdims=True) / total) / total
    d_scores = np.zeros_like(scores)
    np.put_along_axis(d_scores, chosen, dw, axis=-1)
    if attrs["scores"] == "sigmoid":
        return [d_scores * scores * (1 - scores)]
    return [scores * (d_scores - (d_scores * scores).sum(axis=-1, keepdims=True))]


@lower("route_grad", "training")
def lower_route_grad(lowering: TrainingLowering, instr: Instr) -> None:
    chosen, d_shares, logits = map(lowering.place_of, instr.inputs)
    fields = {"logits": logits, "chosen": chosen, "d_shares": d_shares}
    lowering.emit("route_grad", **fields, d_logits=lowering.output(instr.outputs[0]), routing=routing(instr.attrs))


def infer_grouped_experts(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of `experts`, and the products with gate, up and each A of LoRA: `used` rows for each token.

    Raises LayoutError if whole experts are sharded.
    """
    (output,) = infer_experts(inputs, weights, attrs)
    x, chosen, _ = inputs
    experts, ffn, _ = weights[0].dims
    if experts.axis:
        raise LayoutError(f"grouped_experts needs all experts, but {weights[0]} has them sharded over {experts.axis}")
    rows = replace(x.dims[0], width=chosen.dims[-1].elements)
    ranks = [a.dims[1] for a, _ in split_weights(weights, attrs).low.values()]
    return [output, *(((rows, dim), None) for dim in (ffn, ffn, *ranks))]


@op("grouped_experts", infer_grouped_experts)
def grouped_experts(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """As `experts`, with more outputs for the gradients. Their rows are grouped by expert.

    These are the products with gate and up, (tokens * used, ffn), and scale * product with each A, (tokens * used,
    rank).
    """
    x, chosen, shares = inputs
    out, made = np.zeros_like(x), _Experts(context, weights, attrs)
    kept: list[Arrays] = []
    for e, (rows, slots) in enumerate(rows_of(chosen, len(weights[0]))):
        low: dict[int, np.ndarray] = {}
        a, b = (made.product(e, at, x[rows], low) for at in range(DOWN))
        joined = gated(context, [a, b], [], attrs)[0]
        out[rows] += shares[rows, slots, None] * made.product(e, DOWN, joined, low)
        kept.append([a, b, *low.values()])
    return [out, *(np.concatenate(parts) for parts in zip(*kept, strict=True))]


def rows_of(chosen: np.ndarray, experts: int) -> list[tuple[np.ndarray, ...]]:
    """For each expert: the tokens that chose it, and the indices among the choices of these tokens."""
    return [np.nonzero(chosen == e) for e in range(experts)]


class _Experts:
    """A rank's slices of the experts' weights, and products with them."""

    def __init__(self, context: RankContext, weights: Arrays, attrs: Attrs):
        split, ffn = split_weights(weights, attrs), attrs["weights"][0].dims[1]
        self.matrices, self.low, self.scale = split.matrices, split.low, np.float32(attrs.get("scale", 1.0))
        self.begin, self.end = context.share(ffn)
        self.adds_bias, count = context.adds_bias(ffn), len(self.matrices[0])
        self.biases = [bias.reshape(count, -1) for bias in split.biases]

    def bias(self, e: int, at: int) -> np.ndarray | np.float32:
        """This rank's shard of a bias. The bias of down is whole on the rank that adds it, 0 on the others."""
        if not self.biases:
            return np.float32(0)
        return (
            self.biases[at][e] * np.float32(self.adds_bias) if at == DOWN else self.biases[at][e][self.begin : self.end]
        )

    def product(self, e: int, at: int, x: np.ndarray, low: dict[int, np.ndarray]) -> np.ndarray:
        """Multiplies rows with matrix `at` of expert e. Stores scale * product with A in `low`."""
        y = x @ self.matrices[at][e].T + self.bias(e, at)
        if at not in self.low:
            return y
        a, b = self.low[at]
        low[at] = self.scale * (x @ a[e].T)
        return y + low[at] @ b[e].T

    def back(self, e: int, at: int, dy: np.ndarray, d_low: dict[int, np.ndarray]) -> np.ndarray:
        """The gradient of the rows from that of their product. `d_low` receives the gradient of the product with A."""
        dx = dy @ self.matrices[at][e]
        if at not in self.low:
            return dx
        a, b = self.low[at]
        d_low[at] = self.scale * (dy @ b[e])
        return dx + d_low[at] @ a[e]


@vjp("grouped_experts")
def grouped_experts_vjp(g: Emitter, instr: Instr, grads: Gradients, wanted: list[bool]) -> Gradients:
    """One instruction for the gradients of x, shares, weights. Raises LayoutError if a kept output has a gradient."""
    if grads[0] is None or any(grad is not None for grad in grads[1:]):
        raise LayoutError(
            f"grouped_experts has no gradient through its products, only through its result %{instr.outputs[0].name}"
        )
    of_weights = tuple(wanted[3:])
    names = [f"d_{w.name}" for w, is_wanted in zip(instr.weights, of_weights, strict=True) if w and is_wanted]
    operands = (*instr.inputs, *instr.outputs[1:], grads[0])
    names = ["d_experts", "d_shares", *names]
    found = iter(g.emit("grouped_experts_grad", operands, instr.weights, names, wanted=of_weights, **instr.attrs))
    dx, d_shares = next(found), next(found)
    return [dx, None, d_shares, *(next(found) if is_wanted else None for is_wanted in of_weights)]


def infer_grouped_experts_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x, the shares, and the weights whose gradients are wanted.

    x and shares are partial if the intermediate size is sharded. Weights are partial over tokens. A weight that each
    rank has whole, but whose gradient comes from the rank's slice only, is partial over the slices too.
    """
    x, _, shares, *_ = inputs
    ffn, split = weights[0].dims[1], split_weights(weights, attrs)
    partial = summed_over(*weights[0].dims[:-1])
    of_slices = {*split.biases[:DOWN], *(pair[at == DOWN] for at, pair in split.low.items())}
    found: Inferred = [(x.dims, partial), (shares.dims, partial)]
    axes = {w: summed_over(x.dims[0], *([ffn] if w in of_slices else [])) for w in weights}
    return found + [(w.dims, axes[w]) for w, wanted in zip(weights, attrs["wanted"], strict=True) if wanted]


@op("grouped_experts_grad", infer_grouped_experts_grad)
def grouped_experts_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Computes the gradients of each expert from the rows that chose it."""
    (x, chosen, shares, *kept), dy = inputs[:-1], inputs[-1]
    made, dx, d_shares = _Experts(context, weights, attrs), np.zeros_like(x), np.zeros_like(shares)
    split = split_weights([np.zeros_like(w) for w in weights], attrs)
    at, own = 0, slice(made.begin, made.end)
    for e, (rows, slots) in enumerate(rows_of(chosen, len(weights[0]))):
        (a, b), lows = (k[at : at + len(rows)] for k in kept[:DOWN]), [k[at : at + len(rows)] for k in kept[DOWN:]]
        at += len(rows)
        share, d_low = shares[rows, slots, None], dict[int, np.ndarray]()
        joined, d_joined = gated(context, [a, b], [], attrs)[0], made.back(e, DOWN, dy[rows], d_low)  # without share
        of_share = (joined * d_joined).sum(axis=-1)
        d_shares[rows, slots] = of_share + (dy[rows] * made.bias(e, DOWN)).sum(axis=-1)
        d_gate, d_up = gated_grad(context, [a, b, share * d_joined], [], attrs)
        dx[rows] += made.back(e, 0, d_gate, d_low) + made.back(e, 1, d_up, d_low)
        d_outs, ins = (d_gate, d_up, share * dy[rows]), (x[rows], x[rows], joined)
        for number, (d, by) in enumerate(zip(d_outs, ins, strict=True)):
            split.matrices[number][e] = d.T @ by
        for number, low in zip(split.low, lows, strict=True):
            of_a, of_b = split.low[number]
            scaled = share * d_low[number] if number == DOWN else d_low[number]
            of_a[e], of_b[e] = scaled.T @ ins[number], d_outs[number].T @ low
        for number, bias in enumerate(split.biases):
            part = bias.reshape(len(weights[0]), -1)[e]
            part[own if number < DOWN else slice(None)] = d_outs[number].sum(axis=0)
    of_weights = [*split.matrices, *split.biases, *(w for pair in split.low.values() for w in pair)]
    return [dx, d_shares, *(d for d, wanted in zip(of_weights, attrs["wanted"], strict=True) if wanted)]


def _experts(lowering: TrainingLowering, instr: Instr, kept: Sequence[Value]) -> dict[str, Any]:
    """The fields that the step and its gradient's step share. `kept`: the products with gate, up and each A."""
    x, chosen, shares = instr.inputs[:3]
    split = split_weights([instr.weight(index) for index in range(len(instr.weights))], instr.attrs)
    gate, ffn = split.matrices[0], split.matrices[0].dims[1]
    biases: list[Weight | None] = list(split.biases) or [None] * len(STACKS)
    if ffn.axis is not None and lowering.mesh.index(ffn.axis):
        biases[DOWN] = None  # only the first rank adds it
    lows = dict(zip(split.low, map(lowering.place_of, kept[DOWN:]), strict=True))
    low = [
        {
            "a": lowering.parameter(split.low[at][0] if at in lows else None),
            "b": lowering.parameter(split.low[at][1] if at in lows else None),
            "low": lows.get(at, ValueIndex(ABSENT)),
        }
        for at in range(len(STACKS))
    ]
    return {
        "x": lowering.operand(x),
        "chosen": lowering.place_of(chosen),
        "shares": lowering.place_of(shares),
        "experts": gate.dims[0].count,
        "function": GATES[instr.attrs["function"]],
        "gate": lowering.place_of(kept[0]),
        "up": lowering.place_of(kept[1]),
        "low": low,
        "scale": instr.attrs.get("scale", 1.0),
        "bias_column": ffn.span(lowering.mesh)[0],
        **{f"{name}_weight": lowering.parameter(w) for name, w in zip(STACKS, split.matrices, strict=False)},
        **{f"{name}_bias": lowering.parameter(w) for name, w in zip(STACKS, biases, strict=True)},
    }


@lower("grouped_experts", "training")
def lower_grouped_experts(lowering: TrainingLowering, instr: Instr) -> None:
    out, gate, *_ = map(lowering.output, instr.outputs)
    fields = _experts(lowering, instr, instr.outputs[1:])
    lowering.emit("grouped_experts", **fields, out=out, joined=lowering.like(gate))


@lower("grouped_experts_grad", "training")
def lower_grouped_experts_grad(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step, which also adds to the gradients of the weights."""
    fields, gate = _experts(lowering, instr, instr.inputs[3:-1]), lowering.place_of(instr.inputs[3])
    dy, (dx, d_shares, *d_weights) = lowering.operand(instr.inputs[-1]), instr.outputs
    found = iter(d_weights)
    gradients = [next(found) if wanted else None for wanted in instr.attrs["wanted"]]
    fresh = [lowering.is_fresh(of) for of in d_weights]  # all are equal: one instruction has all of a stack's weights
    split = split_weights(list(map(lowering.gradient, gradients)), instr.attrs)
    absent = GradientIndex(ABSENT)
    like = lambda index: index if index == ABSENT else lowering.like(index)
    for at, low in enumerate(fields["low"]):
        of_a, of_b = split.low.get(at, (absent, absent))
        low |= {"a_gradient": of_a, "b_gradient": of_b, "d_low": like(low["low"]), "shared": ValueIndex(ABSENT)}
    fields["low"][DOWN]["shared"] = like(fields["low"][DOWN]["low"])
    lowering.emit(
        "grouped_experts_grad",
        **fields,
        dy=dy,
        dx=lowering.output(dx),
        d_shares=lowering.output(d_shares),
        d_gate=like(gate),
        d_up=like(gate),
        joined=like(gate),
        **{f"{name}_gradient": of for name, of in zip(STACKS, split.matrices, strict=True)},
        **{f"{name}_bias_gradient": of for name, of in zip(STACKS, split.biases or [absent] * 3, strict=True)},
        fresh=all(fresh),
    )


def infer_switched(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x, which may be partial. Raises LayoutError if the switch is not one number per token."""
    x, switch = inputs
    whole("switched", switch)
    if switch.dims[-1].elements != 1:
        raise LayoutError(f"switched needs one number for each token, but %{switch.name} has [{switch.dims[-1]}]")
    return [(x.dims, x.partial)]


@op("switched", infer_switched, takes_partial=True)
def switched(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns x * sigmoid(switch). The switch is one number per token."""
    x, switch = inputs
    return [x * scores_of(switch, "sigmoid")]


@vjp("switched")
def switched_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction for both gradients."""
    return list(g.emit("switched_grad", (*instr.inputs, *grads), names=["d_switched", "d_switch"]))


def infer_switched_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x, and those of the switch, which is partial if x is."""
    x, switch, dy = inputs
    whole("switched_grad", switch, dy)
    return [(x.dims, None), (switch.dims, x.partial)]


@op("switched_grad", infer_switched_grad, takes_partial=True)
def switched_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """With s = sigmoid(switch): dx = dy * s, d_switch = sum(dy * x) * s * (1 - s)."""
    x, switch, dy = inputs
    s = scores_of(switch, "sigmoid")
    return [dy * s, (dy * x).sum(axis=-1, keepdims=True) * s * (1 - s)]


@lower("switched", "training")
def lower_switched(lowering: TrainingLowering, instr: Instr) -> None:
    lowering.emit_rows("switched", instr, "x by")


@lower("switched_grad", "training")
def lower_switched_grad(lowering: TrainingLowering, instr: Instr) -> None:
    lowering.emit_rows("switched_grad", instr, "x by dy", "dx d_by")
