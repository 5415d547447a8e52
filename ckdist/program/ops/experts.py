"""route, which selects experts for each token, and experts, which computes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from ckdist import native
from ckdist.errors import LayoutError
from ckdist.layout import Dim, Range
from ckdist.mesh import HOST, LOCAL, WHOLE
from ckdist.program.lowered import MatrixKey, layer_of
from ckdist.program.ops.elementwise import gate_number, gated
from ckdist.program.ops.low_rank import padded
from ckdist.program.ops.op import ServingLowering, TrainingLowering, lower, op, summed_over, unsharded, vjp
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Group, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr, Value, Weight
from ckdist.program.step import ABSENT, NO_SPAN, GradientIndex, ValueIndex, VectorIndex

Part = TypeVar("Part", Weight, np.ndarray, GradientIndex)  # a weight, its array, or the index of its gradient

DOWN = 2  # index of the down matrix of an expert; gate is 0, up is 1
SCORES = native.numbers("ckdist_scores", "ckdist_scores_")


def infer_route(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """Experts (tokens, used) and shares (tokens, used), or (tokens, used + 1) if all tokens share an expert.

    Raises LayoutError if there are fewer experts to select from than `used`.
    """
    logits = inputs[0]
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


def routing(attrs: Attrs) -> dict[str, Any]:
    """The fields of a `struct ckdist_routing`, from the attributes of a route."""
    names = ("used", "renormalise", "groups", "top_groups", "group_scores", "scale")
    return {**{name: attrs[name] for name in names}, "scores": SCORES[attrs["scores"]]}


@lower("route", "inference")
def lower_route(lowering: ServingLowering, group: Group) -> None:
    """No step: the step of the experts selects them."""


@lower("route", "training")
def lower_route_training(lowering: TrainingLowering, instr: Instr) -> None:
    logits, correction = lowering.place_of(instr.inputs[0]), lowering.parameter(instr.weights[0])
    chosen, shares = map(lowering.output, instr.outputs)
    fields = {"logits": logits, "correction": correction, "chosen": chosen, "shares": shares}
    lowering.emit("route", **fields, routing=routing(instr.attrs))


@vjp("route")
def route_vjp(g: Emitter, instr: Instr, grads: Gradients, wanted: list[bool]) -> Gradients:
    """The gradient of the logits; the correction has none. Raises LayoutError if the shares include a shared expert."""
    chosen, d_shares = instr.outputs[0], grads[1]
    if instr.attrs["scores"] == "sqrt_softplus":
        raise LayoutError(f"route has no gradient of scores that are roots of softplus: {instr}")
    if instr.attrs["shared"]:
        raise LayoutError(f"route has no gradient if its shares include that of a shared expert: {instr}")
    results: Gradients = [None] * len(wanted)
    if d_shares is not None:
        operands = (chosen, d_shares, instr.inputs[0])
        (results[0],) = g.emit("route_grad", operands, names=["d_router"], **instr.attrs)
    return results


@dataclass(frozen=True)
class ExpertWeights(Generic[Part]):
    """The weights of an instruction, by kind."""

    matrices: list[Part]  # gate, up, down of the routed experts; then of the shared expert, if there is one
    biases: list[Part]  # gate, up, down of the routed experts; or none
    low: Mapping[int, tuple[Part, Part]]  # index of a matrix -> its A and B of LoRA

    def low_of(self, first: int) -> list[tuple[Part, Part] | None]:
        """A and B of the three matrices from index `first` on."""
        return [self.low.get(first + at) for at in range(3)]


def split_weights(weights: Sequence[Part], attrs: Attrs) -> ExpertWeights[Part]:
    """Splits weights by kind: matrices, three biases if `biased`, and A and B of each of the `adapted` matrices."""
    adapted, biases = attrs.get("adapted", ()), 3 if attrs.get("biased") else 0
    low = weights[len(weights) - 2 * len(adapted) :] if adapted else []
    end = len(weights) - len(low) - biases
    pairs = dict(zip(adapted, zip(low[::2], low[1::2], strict=True), strict=True))
    return ExpertWeights(list(weights[:end]), list(weights[end : end + biases]), pairs)


def reads_input(weights: Sequence[Weight], attrs: Attrs) -> list[Weight]:
    """The matrices that multiply the input of the experts: gates, ups, and their A of LoRA."""
    split = split_weights(weights, attrs)
    return [w for at, w in enumerate(split.matrices) if at % 3 < 2] + [
        a for at, (a, _) in split.low.items() if at % 3 < 2
    ]


def infer_experts(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x, partial if experts or their intermediate size are sharded. Raises LayoutError if a weight does not
    fit.
    """
    x = inputs[0]
    unsharded("experts", x)
    partial, split = set(), split_weights(weights, attrs)
    matrices, biases = split.matrices, split.biases
    for at in range(0, len(matrices), 3):
        gate, up, down = matrices[at : at + 3]
        fits = gate.dims == up.dims and gate.dims[-1] == x.dims[-1] and down.dims[-2] == x.dims[-1]
        if not fits or down.dims[-1] != gate.dims[-2]:
            raise LayoutError(f"experts: {gate}, {up} and {down} do not lead from [{x.dims[-1]}] back there")
        over_both = [dim.axis for dim in gate.dims[:-1]] == [HOST, LOCAL]
        partial.add((WHOLE,) if over_both else summed_over(*gate.dims[:-1]))
    if len(partial) > 1:
        raise LayoutError(f"experts: {', '.join(map(str, weights))} are not sharded over the same axes")
    for matrix, bias in zip(matrices, biases, strict=False):
        if bias.dims != (replace(matrix.dims[0], width=matrix.dims[1].elements),):
            raise LayoutError(f"experts: {bias} is no bias of {matrix}: it needs all rows of each of the same experts")
    for at, (a, b) in split.low.items():
        *stack, rows, columns = matrices[at].dims
        if a.dims != (*stack, b.dims[-1], columns) or b.dims != (*stack, rows, b.dims[-1]):
            raise LayoutError(f"experts: {a} and {b} do not lead from the columns of {matrices[at]} to its rows")
    return [(x.dims, partial.pop())]


@op("experts", infer_experts)
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
        of_shared = {**attrs, "function": function_of(attrs, 3)}
        out += shares[:, -1:] * _expert(context, x, shared, [], split.low_of(3), of_shared, limit_of(attrs, 3))
    return [out]


def function_of(attrs: Attrs, number: int) -> str:
    """The function of the gates of three matrices from index `number` on."""
    return attrs.get("shared_function", attrs["function"]) if number else attrs["function"]


def limit_of(attrs: Attrs, number: int) -> float:
    """The limit of the gates of three matrices from index `number` on; 0: none."""
    return attrs.get("limits", (0.0, 0.0))[number // 3]


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


def adapted(x: np.ndarray, w: np.ndarray, pair: tuple[np.ndarray, np.ndarray] | None, attrs: Attrs) -> np.ndarray:
    """Returns x @ w.T, plus scale * (x @ A.T) @ B.T if there is a pair (A, B)."""
    if pair is None:
        return x @ w.T
    a, b = pair
    return x @ w.T + np.float32(attrs["scale"]) * ((x @ a.T) @ b.T)


@lower("experts", "inference")
def lower_experts(lowering: ServingLowering, group: Group) -> None:
    """Emits one step, which also selects the experts."""
    instr = group.instr
    x, chosen, _ = instr.inputs
    routed = lowering.graph.maker(chosen, "route")
    if routed is None:
        raise LayoutError(f"cannot lower %{chosen.name}: experts are chosen by a route")
    hashed = routed.attrs.get("hashed", False)
    logits, *switch = (lowering.place_of(v) for v in routed.inputs[: len(routed.inputs) - hashed])
    split = split_weights([instr.weight(index) for index in range(len(instr.weights))], instr.attrs)
    weights, used, rows = split.matrices, routed.attrs["used"], lowering.most_rows(x)
    sets = [_set(lowering, instr, split, 0, rows * used) | _bias_fields(lowering, weights[0].dims[-2], split.biases)]
    sets += [_set(lowering, instr, split, 3, rows) | NO_BIAS] if len(weights) > 3 else []
    out = lowering.result(instr.outputs[0])
    layer = layer_of(weights[0].name) or 0
    lowering.experts[layer] = weights[0].dims[0].count
    lowering.emit(
        "experts",
        lowering.rows_of(x),
        logits=logits,
        switches=switch[0] if switch else ValueIndex(ABSENT),
        correction=lowering.vector(routed.weights[0]),
        share_factors=lowering.vector((*routed.weights, None)[1]),
        experts_of=lowering.vector(routed.weights[2] if hashed else None),
        routing=routing(routed.attrs),
        shares_input=instr.attrs.get("shares_input", False),
        count=len(sets),
        sets=sets,
        layer=layer,
        out=out,
        **({"host_experts": _host_experts(lowering, weights[0].dims[0])} if lowering.host_rows else {}),
    )


NO_BIAS = {**dict.fromkeys(("gate_bias", "up_bias", "down_bias"), VectorIndex(ABSENT)), "biased": ABSENT}


def _bias_fields(lowering: ServingLowering, ffn: Dim, biases: Sequence[Weight]) -> dict[str, Any]:
    """The fields of a set's biases. The first shard of `ffn`, on the rank that has it, adds the bias of down."""
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


def _host_experts(lowering: ServingLowering, experts: Dim) -> list[int]:
    """The first expert of each host, then the end of the last; empty if each host has all experts."""
    if experts.axis is None:
        return []
    held = [experts.share(mesh) for mesh in lowering.mesh.along(experts.axis)]
    return [*(begin for begin, _ in held), held[-1][1]]


def _set(
    lowering: ServingLowering, instr: Instr, split: ExpertWeights[Weight], number: int, rows: int
) -> dict[str, Any]:
    """The fields of a `struct ckdist_expert_set`: three matrices from index `number` on, and up to `rows` rows."""
    x = instr.inputs[0]
    gate, up, down = split.matrices[number : number + 3]
    hidden = (0, x.dims[-1].elements)
    pieces = lowering.shares(gate.dims[-2])  # one range per rank, the same for all sets
    joined = lowering.buffer("arena", sum(end - begin for begin, end in pieces), rows=rows, selected=x.selected)
    activations = [lowering.as_activations(down, piece, rows, x.selected) for piece in pieces]
    held = gate.dims[0].share(lowering.mesh) if len(gate.dims) > 2 else (0, 1)
    stack = held if len(gate.dims) > 2 and gate.dims[0].axis else None
    # without gates, both are one matrix, which is multiplied once
    by_rows = {
        w.name: lowering.matrix([MatrixKey(w.name, piece, hidden, stack) for piece in pieces])
        for w in dict.fromkeys((gate, up))
    }
    return {
        "first": held[0],
        "count": held[1] - held[0],
        "gate_x": lowering.activations(x, gate.name).first,
        "up_x": lowering.activations(x, up.name).first,
        "gate": by_rows[gate.name],
        "up": by_rows[up.name],
        "down": lowering.matrix([MatrixKey(down.name, hidden, piece, stack) for piece in pieces]),
        "function": gate_number(function_of(instr.attrs, number), limit_of(instr.attrs, number)),
        "joined": joined,
        "activations": lowering.shards(activations),
        **_low_fields(lowering, x, split.low_of(number), pieces, stack, rows),
    }


def _low_fields(
    lowering: ServingLowering,
    x: Value,
    low: Sequence[tuple[Weight, Weight] | None],
    pieces: Sequence[Range],
    stack: Range | None,
    rows: int,
) -> dict[str, Any]:
    """The fields of a set's LoRA matrices: A and B of gate, up and down, and the buffers of down's."""
    no_low: dict[str, Any] = {"a": NO_SPAN, "b": NO_SPAN}
    hidden, found = (0, x.dims[-1].elements), [no_low, no_low, no_low]
    fields: dict[str, Any] = {"low_x": ValueIndex(ABSENT), "low_activations": NO_SPAN, "low": ValueIndex(ABSENT)}
    for at, pair in enumerate(low):
        if pair is None:
            continue
        a, b = pair
        ranks = (0, padded(a.dims[-2].elements))
        columns, parts = (pieces, [hidden]) if at == DOWN else ([hidden], pieces)
        found[at] = {
            "a": lowering.matrix([MatrixKey(a.name, ranks, part, stack) for part in columns]),
            "b": lowering.matrix([MatrixKey(b.name, part, ranks, stack) for part in parts]),
        }
        if at == DOWN:
            buffers = [lowering.as_activations(a, piece, rows, x.selected) for piece in pieces]
            fields["low_activations"] = lowering.shards(buffers)
            fields["low"] = lowering.buffer("arena", len(pieces) * ranks[1], rows=rows, selected=x.selected)
        else:
            fields["low_x"] = lowering.activations(x, a.name).first
    return {**fields, "gate_low": found[0], "up_low": found[1], "down_low": found[DOWN]}
