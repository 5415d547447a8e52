"""The definitions in numpy of the ops in `ckdist/program/ops/experts.py`."""

from collections.abc import Sequence

import numpy as np

from ckdist.program.ops.experts import adapted, limit_of, split_weights
from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference
from tests.support.references.elementwise import gated


@reference("route")
def route(context: RankContext, inputs: Arrays, weights: list[np.ndarray | None], attrs: Attrs) -> Arrays:
    """See `Routing`. DeepSeek-V3, arXiv:2412.19437, section 2.1.2; groups as in DeepSeek-V2, arXiv:2405.04434."""
    logits, *switch = inputs[: len(inputs) - attrs.get("hashed", False)]
    correction, factors, experts_of = (*weights, None, None)[:3]
    count, groups = logits.shape[1], attrs["groups"]
    scores = scores_of(logits, attrs["scores"])  # (tokens, experts)
    choice = scores if correction is None else scores + correction
    if groups > 1:
        grouped = choice.reshape(-1, groups, count // groups)
        best = np.sort(grouped, axis=-1)[..., -attrs["group_scores"] :].sum(axis=-1)  # (tokens, groups)
        top = np.argsort(-best, axis=-1, kind="stable")[:, : attrs["top_groups"]]
        allowed = np.zeros(best.shape, bool)
        np.put_along_axis(allowed, top, True, axis=-1)
        choice = np.where(np.repeat(allowed, count // groups, axis=1), choice, -np.inf)
    chosen = np.argsort(-choice, axis=-1, kind="stable")[:, : attrs["used"]]
    if experts_of is not None:  # the bits of whole numbers
        rows = np.clip(inputs[-1], 0, len(experts_of) // attrs["used"] - 1)
        chosen = np.clip(experts_of.view(np.int32).reshape(-1, attrs["used"])[rows], 0, count - 1)
    shares = np.take_along_axis(scores, chosen, axis=-1)
    if attrs["renormalise"]:
        shares = shares / (shares.sum(axis=-1, keepdims=True) + np.float32(1e-20))
    shares = shares * np.float32(attrs["scale"])
    if factors is not None:
        shares = shares * factors[chosen]
    if attrs["shared"]:
        own = 1 / (1 + np.exp(-switch[0])) if switch else np.ones((len(shares), 1), shares.dtype)
        shares = np.concatenate([shares, own], axis=1)
    return [chosen.astype(np.int32), shares]


def scores_of(logits: np.ndarray, kind: str) -> np.ndarray:
    """The sigmoid, the square root of the softplus, or the softmax (over the last dimension) of the logits."""
    if kind == "sqrt_softplus":
        return np.sqrt(np.logaddexp(logits, np.float32(0)))
    if kind == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    terms = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return terms / terms.sum(axis=-1, keepdims=True)


@reference("experts")
def experts(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Sum over a token's experts e of share_e * down_e(f(gate_e x) * up_e x). Fedus et al. 2021, arXiv:2101.03961.

    The sum is in the order of the experts, the shared expert last. Only routed experts have biases, (experts * rows of
    a matrix,). If the result is partial over shards of the intermediate size, the first rank adds the bias of down.
    `adapted` matrices are W + scale * B A: see `low_rank`.
    """
    x, chosen, shares = inputs
    split = split_weights(weights, attrs)
    (gate, _, _, *shared), biases, low = split.matrices, split.biases, split.low_of(0)
    experts_dim, ffn = attrs["weights"][0].dims[:2]
    first, (begin, end) = context.share(experts_dim)[0], context.share(ffn)
    out = np.zeros_like(x)
    for e in range(len(gate)):
        rows, slots = np.nonzero(chosen == first + e)
        own = [bias.reshape(len(gate), -1)[e] for bias in biases]
        if own:
            own = [own[0][begin:end], own[1][begin:end], own[2] * np.float32(context.adds_bias(ffn))]
        pairs = [pair and (pair[0][e], pair[1][e]) for pair in low]
        matrices = [w[e] for w in split.matrices[:3]]
        of_rows, by_input = shares[rows, slots, None], attrs.get("shares_input", False)
        inputs_of = x[rows] * of_rows if by_input else x[rows]
        made = _expert(context, inputs_of, matrices, own, pairs, attrs, limit_of(attrs, 0))
        out[rows] += made if by_input else of_rows * made
    if shared:
        out += shares[:, -1:] * _expert(context, x, shared, [], split.low_of(3), attrs, limit_of(attrs, 3))
    return [out]


def _expert(
    context: RankContext,
    x: np.ndarray,
    weights: Arrays,
    biases: Arrays,
    low: Sequence[tuple[np.ndarray, np.ndarray] | None],
    attrs: Attrs,
    limit: float,
) -> np.ndarray:
    """One expert: (rows, hidden) -> (rows, hidden). `biases` is empty or has those of gate, up and down."""
    of_gate, of_up, of_down = (
        lambda y, w=w, bias=bias, pair=pair: adapted(y, w, pair, attrs) + bias
        for w, bias, pair in zip(weights, biases or [np.float32(0)] * 3, low, strict=True)
    )
    return of_down(gated(context, [of_gate(x), of_up(x)], [], {**attrs, "limit": limit})[0])
