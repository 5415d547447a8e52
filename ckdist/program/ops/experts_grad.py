"""Gradients of route and experts. The choice itself has none: a token's gradient flows through the shares of its
experts, and through what they compute.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.ops.elementwise import gated, gated_grad
from ckdist.program.ops.experts import scores_of
from ckdist.program.ops.op import Arrays, Attrs, Gradients, Inferred, Values, Weights, op, summed_over, vjp, whole
from ckdist.program.program import Instr
from ckdist.program.rank_context import RankContext

if TYPE_CHECKING:  # which imports the ops
    from ckdist.program.emitter import Emitter


@vjp("route")
def route_vjp(g: "Emitter", instr: Instr, grads: Gradients, wanted: list[bool]) -> Gradients:
    """Of the logits, and of the gate of the experts that all tokens take; a correction has none."""
    chosen, d_shares = instr.outputs[0], grads[1]
    if d_shares is None:
        return [None] * len(wanted)
    names = [f"d_{value.name.rpartition('.')[0]}" for value in instr.inputs]
    results = g.emit("route_grad", (chosen, d_shares, *instr.inputs), names=names, **instr.attrs)
    return [*results, *[None] * len(instr.weights)]


def infer_route_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """As each of the logits."""
    whole("route_grad", *inputs)
    return [(logits.dims, None) for logits in inputs[2:]]


@op("route_grad", infer_route_grad)
def route_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """From the shares w = scale s / sum(s) of the chosen scores s, or w = scale s, back to the logits."""
    chosen, d_shares, logits, *switch = inputs
    scores, used = scores_of(logits, attrs["scores"]), attrs["used"]
    s, dw = np.take_along_axis(scores, chosen, axis=-1), d_shares[:, :used] * np.float32(attrs["scale"])
    if attrs["renormalise"]:
        total = s.sum(axis=-1, keepdims=True) + np.float32(1e-20)
        dw = (dw - (dw * s).sum(axis=-1, keepdims=True) / total) / total
    d_scores = np.zeros_like(scores)
    np.put_along_axis(d_scores, chosen, dw, axis=-1)
    if attrs["scores"] == "sigmoid":
        results = [d_scores * scores * (1 - scores)]
    else:
        results = [scores * (d_scores - (d_scores * scores).sum(axis=-1, keepdims=True))]
    for x in switch:
        own = scores_of(x, "sigmoid")
        results.append(d_shares[:, used:] * own * (1 - own))
    return results


@vjp("experts")
def experts_vjp(g: "Emitter", instr: Instr, grads: Gradients, wanted: list[bool]) -> Gradients:
    """One instruction for the gradients of x, of the shares and of the weights. LayoutError where there are biases."""
    if instr.attrs.get("biased"):
        raise LayoutError(f"experts have no gradient where they have biases: {instr}")
    of_weights = tuple(wanted[3:])
    names = [
        "d_experts",
        "d_shares",
        *(f"d_{w.name}" for w, is_wanted in zip(instr.weights, of_weights, strict=True) if w and is_wanted),
    ]
    found = iter(
        g.emit(
            "experts_grad",
            (*instr.inputs, *(dy for dy in grads if dy is not None)),
            instr.weights,
            names,
            function=instr.attrs["function"],
            wanted=of_weights,
        )
    )
    dx, d_shares = next(found), next(found)
    return [dx, None, d_shares, *(next(found) if is_wanted else None for is_wanted in of_weights)]


def infer_experts_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """As x and the shares, partial where experts or their size are sharded; as the weights, partial over tokens."""
    x, _, shares, _ = inputs
    whole("experts_grad", *inputs)
    partial = summed_over(*weights[0].dims[:-1])
    found: Inferred = [(x.dims, partial), (shares.dims, partial)]
    over_tokens = summed_over(x.dims[0])
    return found + [(w.dims, over_tokens) for w, wanted in zip(weights, attrs["wanted"], strict=True) if wanted]


@dataclass
class _Expert:
    """One expert's weights, and the gradients to which its rows add."""

    weights: Arrays  # gate, up, down
    gradients: Arrays

    def back(self, context: RankContext, x: np.ndarray, shares: np.ndarray, dy: np.ndarray, attrs: Attrs) -> Arrays:
        """For rows x: the gradients of x, (rows, hidden), and of their shares, (rows,)."""
        gate, up, down = self.weights
        a, b = x @ gate.T, x @ up.T
        joined = gated(context, [a, b], [], attrs)[0]
        d_joined = dy @ down  # before the share
        d_shares = (joined * d_joined).sum(axis=-1)
        da, db = gated_grad(context, [a, b, shares[:, None] * d_joined], [], attrs)
        self.gradients[0] += da.T @ x
        self.gradients[1] += db.T @ x
        self.gradients[2] += (shares[:, None] * dy).T @ joined
        return [da @ gate + db @ up, d_shares]


@op("experts_grad", infer_experts_grad)
def experts_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Each expert's gradients from the rows that took it."""
    x, chosen, shares, dy = inputs
    of_weights = [np.zeros_like(w) for w in weights]
    dx, d_shares = np.zeros_like(x), np.zeros_like(shares)
    first = context.share(attrs["weights"][0].dims[0])[0]
    for e in range(len(weights[0])):
        rows, slots = np.nonzero(chosen == first + e)
        one = _Expert([w[e] for w in weights[:3]], [d[e] for d in of_weights[:3]])
        d_rows, d_own = one.back(context, x[rows], shares[rows, slots], dy[rows], attrs)
        dx[rows] += d_rows
        d_shares[rows, slots] = d_own
    if len(weights) > 3:
        d_rows, d_shares[:, -1] = _Expert(weights[3:], of_weights[3:]).back(context, x, shares[:, -1], dy, attrs)
        dx += d_rows
    return [dx, d_shares, *(d for d, wanted in zip(of_weights, attrs["wanted"], strict=True) if wanted)]
