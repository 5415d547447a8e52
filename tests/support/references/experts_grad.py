"""The definitions in numpy of the ops in `ckdist/program/ops/experts_grad.py`."""

import numpy as np

from ckdist.program.ops.experts import DOWN, split_weights
from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference
from tests.support.references.elementwise import gated
from tests.support.references.elementwise_grad import gated_grad
from tests.support.references.experts import scores_of


@reference("route_grad")
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


@reference("grouped_experts")
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


@reference("grouped_experts_grad")
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


@reference("switched")
def switched(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns x * sigmoid(switch). The switch is one number per token."""
    x, switch = inputs
    return [x * scores_of(switch, "sigmoid")]


@reference("switched_grad")
def switched_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """With s = sigmoid(switch): dx = dy * s, d_switch = sum(dy * x) * s * (1 - s)."""
    x, switch, dy = inputs
    s = scores_of(switch, "sigmoid")
    return [dy * s, (dy * x).sum(axis=-1, keepdims=True) * s * (1 - s)]
