"""What training computes of a mixture of experts: route's gradient, experts that keep what their gradients read, and
experts that all tokens take times a switch. The choice itself has no gradient: a token's flows through the shares of
its experts, and through what they compute.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.ops.elementwise import GATES, gated, gated_grad
from ckdist.program.ops.experts import infer_experts, routing, scores_of
from ckdist.program.ops.op import (
    Arrays,
    Attrs,
    Gradients,
    Inferred,
    Values,
    Weights,
    lower,
    op,
    summed_over,
    vjp,
    whole,
)
from ckdist.program.program import Instr, Value
from ckdist.program.rank_context import RankContext
from ckdist.program.step import ABSENT, GradientIndex

if TYPE_CHECKING:  # which import the ops
    from ckdist.program.emitter import Emitter
    from ckdist.program.lower_training import TrainingLowering

STACKS = ("gate", "up", "down")


@vjp("route")
def route_vjp(g: "Emitter", instr: Instr, grads: Gradients, wanted: list[bool]) -> Gradients:
    """Of the logits; a correction has none. LayoutError where the shares end in that of an expert that all take."""
    chosen, d_shares = instr.outputs[0], grads[1]
    if instr.attrs["shared"]:
        raise LayoutError(f"route has no gradient where it gives the share of an expert that all tokens take: {instr}")
    results: Gradients = [None] * len(wanted)
    if d_shares is not None:
        operands = (chosen, d_shares, instr.inputs[0])
        (results[0],) = g.emit("route_grad", operands, names=["d_router"], **instr.attrs)
    return results


def infer_route_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """As the logits."""
    whole("route_grad", *inputs)
    return [(inputs[2].dims, None)]


@op("route_grad", infer_route_grad)
def route_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """From the shares w = scale s / sum(s) of the chosen scores s, or w = scale s, back to the logits."""
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


@lower("route", "training")
def lower_route(lowering: "TrainingLowering", instr: Instr) -> None:
    """One step."""
    logits, correction = lowering.value(instr.inputs[0]), lowering.parameter(instr.weights[0])
    chosen, shares = map(lowering.output, instr.outputs)
    fields = {"logits": logits, "correction": correction, "chosen": chosen, "shares": shares}
    lowering.emit("route", **fields, routing=routing(instr.attrs))


@lower("route_grad", "training")
def lower_route_grad(lowering: "TrainingLowering", instr: Instr) -> None:
    """One step."""
    chosen, d_shares, logits = map(lowering.value, instr.inputs)
    fields = {"logits": logits, "chosen": chosen, "d_shares": d_shares}
    lowering.emit("route_grad", **fields, d_logits=lowering.output(instr.outputs[0]), routing=routing(instr.attrs))


def infer_grouped_experts(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """As `experts`, and what gate and up make of every row of every expert: `used` rows of each token.

    LayoutError where whole experts are sharded.
    """
    (output,) = infer_experts(inputs, weights, attrs)
    x, chosen, _ = inputs
    experts, ffn, _ = weights[0].dims
    if experts.axis:
        raise LayoutError(f"grouped_experts needs all experts, but {weights[0]} has them sharded over {experts.axis}")
    kept = (replace(x.dims[0], width=chosen.dims[-1].elements), ffn)
    return [output, (kept, None), (kept, None)]


@op("grouped_experts", infer_grouped_experts)
def grouped_experts(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """As `experts`; also what gate and up make of the rows, those of an expert behind those of the one before it,
    (tokens * used, ffn).
    """
    x, chosen, shares = inputs
    out, gates, ups = np.zeros_like(x), [], []
    for (rows, slots), gate, up, down in zip(rows_of(chosen, len(weights[0])), *weights, strict=True):
        a, b = x[rows] @ gate.T, x[rows] @ up.T
        out[rows] += shares[rows, slots, None] * (gated(context, [a, b], [], attrs)[0] @ down.T)
        gates.append(a)
        ups.append(b)
    return [out, np.concatenate(gates), np.concatenate(ups)]


def rows_of(chosen: np.ndarray, experts: int) -> list[tuple[np.ndarray, ...]]:
    """Of each expert the tokens that chose it, and as which of their choices."""
    return [np.nonzero(chosen == e) for e in range(experts)]


@vjp("grouped_experts")
def grouped_experts_vjp(g: "Emitter", instr: Instr, grads: Gradients, wanted: list[bool]) -> Gradients:
    """One instruction for the gradients of x, of the shares and of the weights. LayoutError for one through what is
    kept.
    """
    if grads[0] is None or any(grad is not None for grad in grads[1:]):
        raise LayoutError(
            f"grouped_experts has no gradient through what gate and up make, only through %{instr.outputs[0].name}"
        )
    of_weights = tuple(wanted[3:])
    names = [f"d_{w.name}" for w, is_wanted in zip(instr.weights, of_weights, strict=True) if w and is_wanted]
    operands = (*instr.inputs, *instr.outputs[1:], grads[0])
    found = iter(
        g.emit(
            "grouped_experts_grad",
            operands,
            instr.weights,
            ["d_experts", "d_shares", *names],
            function=instr.attrs["function"],
            wanted=of_weights,
        )
    )
    dx, d_shares = next(found), next(found)
    return [dx, None, d_shares, *(next(found) if is_wanted else None for is_wanted in of_weights)]


def infer_grouped_experts_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """As x and the shares, partial where the experts' size is sharded; as the weights, partial over tokens."""
    x, _, shares, *_ = inputs
    whole("grouped_experts_grad", *inputs)
    partial = summed_over(*weights[0].dims[:-1])
    found: Inferred = [(x.dims, partial), (shares.dims, partial)]
    over_tokens = summed_over(x.dims[0])
    return found + [(w.dims, over_tokens) for w, wanted in zip(weights, attrs["wanted"], strict=True) if wanted]


@op("grouped_experts_grad", infer_grouped_experts_grad)
def grouped_experts_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Each expert's gradients from the rows that took it."""
    x, chosen, shares, a_all, b_all, dy = inputs
    dx, d_shares, of_weights = np.zeros_like(x), np.zeros_like(shares), [np.zeros_like(w) for w in weights]
    at = 0
    for e, (rows, slots) in enumerate(rows_of(chosen, len(weights[0]))):
        a, b = a_all[at : at + len(rows)], b_all[at : at + len(rows)]
        at += len(rows)
        gate, up, down = (w[e] for w in weights)
        share = shares[rows, slots, None]
        joined, d_joined = gated(context, [a, b], [], attrs)[0], dy[rows] @ down  # before the share
        d_shares[rows, slots] = (joined * d_joined).sum(axis=-1)
        da, db = gated_grad(context, [a, b, share * d_joined], [], attrs)
        dx[rows] += da @ gate + db @ up
        pairs = ((da, x[rows]), (db, x[rows]), (dy[rows], share * joined))
        for of_weight, (d, by) in zip(of_weights, pairs, strict=True):
            of_weight[e] = d.T @ by
    return [dx, d_shares, *(d for d, wanted in zip(of_weights, attrs["wanted"], strict=True) if wanted)]


def _experts(lowering: "TrainingLowering", instr: Instr) -> dict[str, Any]:
    """What a step of experts and that of their gradients have in common."""
    x, chosen, shares = instr.inputs[:3]
    count, gate = instr.weight(0).dims[0].count, GATES[instr.attrs["function"]]
    weights = {f"{name}_weight": lowering.parameter(instr.weight(at)) for at, name in enumerate(STACKS)}
    values = {"x": lowering.operand(x), "chosen": lowering.value(chosen), "shares": lowering.value(shares)}
    return {**values, **weights, "experts": count, "function": gate}


@lower("grouped_experts", "training")
def lower_grouped_experts(lowering: "TrainingLowering", instr: Instr) -> None:
    """One step."""
    fields = _experts(lowering, instr)
    out, gate, up = map(lowering.output, instr.outputs)
    lowering.emit(
        "grouped_experts",
        **fields,
        out=out,
        gate=gate,
        up=up,
        joined=lowering.like(gate, lowering.placed[gate].operand),
    )


@lower("grouped_experts_grad", "training")
def lower_grouped_experts_grad(lowering: "TrainingLowering", instr: Instr) -> None:
    """One step, which adds the gradients of the weights to their places."""
    fields = _experts(lowering, instr)
    gate, up = map(lowering.value, instr.inputs[3:5])
    dy, (dx, d_shares, *d_weights) = lowering.operand(instr.inputs[5]), instr.outputs
    found = iter(d_weights)
    gradients = [next(found) if wanted else None for wanted in instr.attrs["wanted"]]
    fresh = [lowering.is_fresh(of) for of in d_weights]  # a stack is in one instruction
    lowering.emit(
        "grouped_experts_grad",
        **fields,
        gate=gate,
        up=up,
        dy=dy,
        dx=lowering.output(dx),
        d_shares=lowering.output(d_shares),
        d_gate=lowering.like(gate, lowering.placed[gate].operand),
        d_up=lowering.like(gate, lowering.placed[gate].operand),
        joined=lowering.like(gate, lowering.placed[gate].operand),
        **{
            f"{name}_gradient": GradientIndex(ABSENT) if of is None else lowering.gradient(of)
            for name, of in zip(STACKS, gradients, strict=True)
        },
        fresh=all(fresh),
    )


def infer_switched(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """As x, which may be partial. LayoutError where the switch is not one number a token."""
    x, switch = inputs
    whole("switched", switch)
    if switch.dims[-1].elements != 1:
        raise LayoutError(f"switched needs one number for each token, but %{switch.name} has [{switch.dims[-1]}]")
    return [(x.dims, x.partial)]


@op("switched", infer_switched)
def switched(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """X * sigmoid(switch), of every token one number."""
    x, switch = inputs
    return [x * scores_of(switch, "sigmoid")]


@vjp("switched")
def switched_vjp(g: "Emitter", instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction for both gradients."""
    return list(g.emit("switched_grad", (*instr.inputs, *grads), names=["d_switched", "d_switch"]))


def infer_switched_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """As x, whole, and as the switch, partial where x is."""
    x, switch, dy = inputs
    whole("switched_grad", switch, dy)
    return [(x.dims, None), (switch.dims, x.partial)]


@op("switched_grad", infer_switched_grad)
def switched_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """With s = sigmoid(switch): dx = dy * s, d_switch = sum(dy * x) * s * (1 - s)."""
    x, switch, dy = inputs
    s = scores_of(switch, "sigmoid")
    return [dy * s, (dy * x).sum(axis=-1, keepdims=True) * s * (1 - s)]


@lower("switched", "training")
def lower_switched(lowering: "TrainingLowering", instr: Instr) -> None:
    """One step."""
    x, switch = map(lowering.value, instr.inputs)
    lowering.emit("switched", x=x, by=switch, out=lowering.output(instr.outputs[0]))


@lower("switched_grad", "training")
def lower_switched_grad(lowering: "TrainingLowering", instr: Instr) -> None:
    """One step."""
    x, switch, dy = map(lowering.value, instr.inputs)
    dx, d_switch = map(lowering.output, instr.outputs)
    lowering.emit("switched_grad", x=x, by=switch, dy=dy, dx=dx, d_by=d_switch)
