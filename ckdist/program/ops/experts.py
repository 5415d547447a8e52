"""route, which chooses experts for each token, and experts, which computes what they make of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ckdist import native
from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.mesh import HOST, LOCAL, WHOLE
from ckdist.program.lowered import MatrixKey, layer_of
from ckdist.program.ops.elementwise import GATES, gated
from ckdist.program.ops.op import Arrays, Attrs, Inferred, Values, Weights, lower, op, summed_over, unsharded, whole
from ckdist.program.program import Instr, Weight
from ckdist.program.rank_context import RankContext
from ckdist.program.step import ABSENT, Span, ValueIndex, VectorIndex

if TYPE_CHECKING:  # which import the ops
    from ckdist.program.fusion import Group
    from ckdist.program.lower import Lowering

Part = TypeVar("Part", Weight, np.ndarray)  # of an instruction's weights, or its arrays

SCORES = native.numbers("ckdist_scores", "ckdist_scores_")


def infer_route(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, used) experts and (tokens, used and one more where all tokens share an expert) shares; LayoutError where
    they cannot be chosen.
    """
    logits = inputs[0]
    whole("route", *inputs)
    unsharded("route", logits)
    count, used, groups = logits.dims[-1].elements, attrs["used"], attrs["groups"]
    if count % groups or used > count // groups * attrs["top_groups"]:
        raise LayoutError(
            f"route cannot choose {used} of {count} experts in {attrs['top_groups']} of {groups} equal groups"
        )
    tokens = logits.dims[0]
    return [((tokens, Dim("used", used)), None), ((tokens, Dim("shares", used + attrs["shared"])), None)]


@op("route", infer_route, dtypes=("i32", "f32"))
def route(context: RankContext, inputs: Arrays, weights: list[np.ndarray | None], attrs: Attrs) -> Arrays:
    """See `Routing`. DeepSeek-V3, arXiv:2412.19437, section 2.1.2; groups as in DeepSeek-V2, arXiv:2405.04434."""
    logits, *switch = inputs
    (correction,) = weights
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
    shares = np.take_along_axis(scores, chosen, axis=-1)
    if attrs["renormalise"]:
        shares = shares / (shares.sum(axis=-1, keepdims=True) + np.float32(1e-20))
    shares = shares * np.float32(attrs["scale"])
    if attrs["shared"]:
        own = 1 / (1 + np.exp(-switch[0])) if switch else np.ones((len(shares), 1), shares.dtype)
        shares = np.concatenate([shares, own], axis=1)
    return [chosen.astype(np.int32), shares]


def scores_of(logits: np.ndarray, kind: str) -> np.ndarray:
    """The sigmoid, or the softmax over the last dimension."""
    if kind == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    terms = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return terms / terms.sum(axis=-1, keepdims=True)


def routing(attrs: Attrs) -> dict[str, Any]:
    """The fields of a `struct ckdist_routing`, from the attributes of a route."""
    names = ("used", "renormalise", "groups", "top_groups", "group_scores", "scale")
    return {**{name: attrs[name] for name in names}, "scores": SCORES[attrs["scores"]]}


@lower("route", "inference")
def lower_route(lowering: "Lowering", group: "Group") -> None:
    """No step: experts are chosen by the step that computes them."""


def infer_experts(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """As x, partial where the experts or their intermediate size are sharded; LayoutError where weights do not fit."""
    x = inputs[0]
    whole("experts", *inputs)
    unsharded("experts", x)
    partial = set()
    matrices, biases = split_weights(weights, attrs)
    for at in range(0, len(matrices), 3):
        gate, up, down = matrices[at : at + 3]
        fits = gate.dims == up.dims and gate.dims[-1] == x.dims[-1] and down.dims[-2] == x.dims[-1]
        if not fits or down.dims[-1] != gate.dims[-2]:
            raise LayoutError(f"experts: {gate}, {up} and {down} do not lead from [{x.dims[-1]}] back there")
        over_both = [dim.axis for dim in gate.dims[:-1]] == [HOST, LOCAL]
        partial.add((WHOLE,) if over_both else summed_over(*gate.dims[:-1]))
    if len(partial) > 1:
        raise LayoutError(f"experts: {', '.join(map(str, weights))} are not sharded alike")
    for matrix, bias in zip(matrices, biases, strict=False):
        if bias.dims != (replace(matrix.dims[0], width=matrix.dims[1].elements),):
            raise LayoutError(f"experts: {bias} is no bias of {matrix}: it needs all rows of each of the same experts")
    return [(x.dims, partial.pop())]


def split_weights(weights: Sequence[Part], attrs: Attrs) -> tuple[list[Part], list[Part]]:
    """The matrices, and the biases of the chosen experts' gate, up and down, where these are `biased`."""
    count = len(weights) - (3 if attrs.get("biased") else 0)
    return list(weights[:count]), list(weights[count:])


@op("experts", infer_experts)
def experts(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """For each token the sum over its experts e of share_e * down_e(f(gate_e x) * up_e x), in the order of experts, and
    then that of the experts that all tokens take. Fedus et al. 2021, arXiv:2101.03961.

    Biases, (experts * rows of a matrix,), are of the chosen experts; where the result is partial over shards of their
    size, the first rank adds that of down.
    """
    x, chosen, shares = inputs
    (gate, up, down, *shared), biases = split_weights(weights, attrs)
    experts_dim, ffn = attrs["weights"][0].dims[:2]
    first, (begin, end) = context.share(experts_dim)[0], context.share(ffn)
    out = np.zeros_like(x)
    for e in range(len(gate)):
        rows, slots = np.nonzero(chosen == first + e)
        own = [bias.reshape(len(gate), -1)[e] for bias in biases]
        if own:
            own = [own[0][begin:end], own[1][begin:end], own[2] * np.float32(context.adds_bias(ffn))]
        out[rows] += shares[rows, slots, None] * _expert(context, x[rows], [gate[e], up[e], down[e]], own, attrs)
    if shared:
        out += shares[:, -1:] * _expert(context, x, shared, [], attrs)
    return [out]


def _expert(context: RankContext, x: np.ndarray, weights: Arrays, biases: Arrays, attrs: Attrs) -> np.ndarray:
    """What one makes of x: (rows, hidden) -> the same. `biases`: of gate, up and down, or none."""
    gate, up, down = weights
    of_gate, of_up, of_down = biases or [np.float32(0)] * 3
    return gated(context, [x @ gate.T + of_gate, x @ up.T + of_up], [], attrs)[0] @ down.T + of_down


@lower("experts", "inference")
def lower_experts(lowering: "Lowering", group: "Group") -> None:
    """One step, which chooses the experts as well."""
    instr = group.instr
    x, chosen, _ = instr.inputs
    routed = lowering.graph.maker(chosen, "route")
    if routed is None:
        raise LayoutError(f"cannot lower %{chosen.name}: experts are chosen by a route")
    logits, *switch = (lowering.place_of(v) for v in routed.inputs)
    weights, biases = split_weights([instr.weight(index) for index in range(len(instr.weights))], instr.attrs)
    used, rows = routed.attrs["used"], lowering.most_rows(x)
    sets = [_set(lowering, instr, weights[:3], rows * used) | _bias_fields(lowering, weights[0].dims[-2], biases)]
    sets += [_set(lowering, instr, weights[3:], rows) | NO_BIAS] if len(weights) > 3 else []
    (out,) = lowering.results([instr.outputs[0]])
    lowering.at[instr.outputs[0].name] = out
    layer = layer_of(weights[0].name) or 0
    lowering.experts[layer] = weights[0].dims[0].count
    lowering.emit(
        "experts",
        lowering.rows_of(x),
        logits=logits,
        switches=switch[0] if switch else ValueIndex(ABSENT),
        correction=lowering.vector(routed.weights[0]),
        routing=routing(routed.attrs),
        gate=GATES[instr.attrs["function"]],
        count=len(sets),
        sets=sets,
        layer=layer,
        out=out,
        **({"host_experts": _host_experts(lowering, weights[0].dims[0])} if lowering.host_rows else {}),
    )


NO_BIAS = {**dict.fromkeys(("gate_bias", "up_bias", "down_bias"), VectorIndex(ABSENT)), "biased": ABSENT}


def _bias_fields(lowering: "Lowering", ffn: Dim, biases: Sequence[Weight]) -> dict[str, Any]:
    """The fields of a set's biases: which of the shards of `ffn` has that of down is the first, on the rank that has
    it.
    """
    if not biases:
        return NO_BIAS
    first = ffn.axis is None or lowering.mesh.index(ffn.axis) == 0
    gate, up, down = map(lowering.vector, biases)
    return {
        "gate_bias": gate,
        "up_bias": up,
        "down_bias": down if first else VectorIndex(ABSENT),
        "biased": 0 if first else ABSENT,
        "bias_width": ffn.elements,
        "bias_column": lowering.shares(ffn)[0][0],
    }


def _host_experts(lowering: "Lowering", experts: Dim) -> list[int]:
    """The first expert of each host, and behind the last; none where every host has all."""
    if experts.axis is None:
        return []
    held = [experts.share(mesh) for mesh in lowering.mesh.along(experts.axis)]
    return [*(begin for begin, _ in held), held[-1][1]]


def _set(lowering: "Lowering", instr: Instr, weights: list[Weight], rows: int) -> dict[str, Any]:
    """The fields of a `struct ckdist_expert_set` that is computed for at most so many rows."""
    x = instr.inputs[0]
    gate, up, down = weights
    hidden = (0, x.dims[-1].elements)
    pieces = lowering.shares(gate.dims[-2])  # of each rank, for all sets alike
    joined = lowering.buffer("arena", sum(end - begin for begin, end in pieces), rows=rows, selected=x.selected)
    first = ValueIndex(len(lowering.buffers))
    lowering.buffers += [lowering.as_activations(down, piece, rows, x.selected) for piece in pieces]
    held = gate.dims[0].share(lowering.mesh) if len(gate.dims) > 2 else (0, 1)
    stack = held if len(gate.dims) > 2 and gate.dims[0].axis else None
    by_rows = lambda w: lowering.matrix([MatrixKey(w.name, piece, hidden, stack) for piece in pieces])
    return {
        "first": held[0],
        "count": held[1] - held[0],
        "gate_x": lowering.activations(x, gate.name).first,
        "up_x": lowering.activations(x, up.name).first,
        "gate": by_rows(gate),
        "up": by_rows(up),
        "down": lowering.matrix([MatrixKey(down.name, hidden, piece, stack) for piece in pieces]),
        "joined": joined,
        "activations": Span(first, len(pieces)),
    }
