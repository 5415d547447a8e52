"""Several streams of hidden states, or earlier blocks' streams, which a part of a layer reads as one.

Hyper-connections (mix_streams), gates of low rank (add_streams, read_streams, gate_streams), alternating updates
(altup_predict, altup_correct, match_rms) and attention residuals (mix_blocks). None has a gradient.
"""

from typing import Any

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.program.ops.op import ServingLowering, lower, op, same, unsharded
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, RankContext, Values, Weights
from ckdist.program.ops.rms_norm import inverse_rms
from ckdist.program.program import Value
from ckdist.program.step import ABSENT, Span, ValueIndex, VectorIndex

MOST_STREAMS = 8  # as in runtime/steps/mix_streams.cpp


def infer_mix_streams(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, hidden); unless it is `last` also the streams and the coefficients for the next call."""
    y, *before = inputs
    unsharded("mix_streams", y)
    count, width = attrs["streams"], y.dims[-1].elements
    apart = attrs.get("apart", False)
    parts = count * (1 if attrs["last"] else 2 if apart else count + 2)
    needed = [parts * count * width, parts, 1 if attrs["last"] else 3 - apart]
    needed = needed if weights or not attrs["last"] else []
    if count > MOST_STREAMS or [w.dims[0].elements for w in weights] != needed:
        given = ", ".join(map(str, weights))
        raise LayoutError(f"mix_streams: {count} streams of {width}, at most {MOST_STREAMS}, do not fit {given}")
    if before and before[0].dims[-1].elements != count * width:
        raise LayoutError(f"mix_streams: [{before[0].dims[-1]}] is not {count} streams of [{y.dims[-1]}]")
    tokens = y.dims[0]
    coefs = Dim("coefs", count if apart else count * (count + 1))
    more = [(tokens, Dim("streams", count, width)), (tokens, coefs)]
    return [(y.dims, None), *((dims, None) for dims in more if not attrs["last"])]


@op("mix_streams", infer_mix_streams)
def mix_streams(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Xie et al. 2025, arXiv:2512.24880 (mHC). It has no gradient.

    Inputs: y, the result of a part of a layer, and that part's streams x and coefficients (post, comb).
    Stream i becomes post[i] * y + sum over j of comb[j, i] * x[j]; without x it is y. Then w = fn * streams /
    rms(streams) in three parts, times their `scale`, plus `base`: pre = sigmoid + eps, post = 2 sigmoid, and comb with
    rows and columns of sum 1, by divisions of a softmax. The result is the sum of pre[i] * stream i. Without weights it
    is the mean of streams. With `apart` there is no comb, stream i keeps its x, and post = magnitude sigmoid + eps.
    """
    y, *before = inputs
    count, eps = attrs["streams"], np.float32(attrs["eps"])
    apart, magnitude = attrs.get("apart", False), np.float32(attrs.get("magnitude", 2.0))
    if before and apart:
        streams = before[1][..., None] * y[:, None] + before[0].reshape(len(y), count, -1)
    elif before:
        post, comb = before[1][:, :count], before[1][:, count:].reshape(-1, count, count)
        streams = post[..., None] * y[:, None] + np.einsum("tji,tjd->tid", comb, before[0].reshape(len(y), count, -1))
    else:
        streams = np.repeat(y[:, None], count, axis=1)
    if not weights:
        return [streams.mean(axis=1)]
    (fn, base, scale), flat = weights, streams.reshape(len(y), -1)
    w = flat @ fn.reshape(-1, flat.shape[1]).T
    w = w / np.sqrt(np.mean(flat * flat, axis=-1, keepdims=True) + np.float32(attrs["norm_eps"]))
    w = w * scale[np.minimum(np.arange(w.shape[1]) // count, 2)] + base
    sigmoids = 1 / (1 + np.exp(-w[:, : 2 * count]))
    out = np.einsum("ti,tid->td", sigmoids[:, :count] + eps, streams)
    if attrs["last"]:
        return [out]
    post = magnitude * sigmoids[:, count:] + (eps if apart else 0)
    if apart:
        return [out, flat, post]
    terms = np.exp(w[:, 2 * count :]).reshape(-1, count, count)
    comb = terms / terms.sum(axis=-1, keepdims=True) + eps
    for step in range(attrs["iterations"]):
        if step:
            comb = comb / (comb.sum(axis=2, keepdims=True) + eps)
        comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
    return [out, flat, np.concatenate([post, comb.reshape(len(y), -1)], axis=1)]


@lower("mix_streams", "inference")
def lower_mix_streams(lowering: ServingLowering, group: Group) -> None:
    instr = group.instr
    y, *before = map(lowering.place_of, instr.inputs)
    places = lowering.own_rows(*instr.outputs)
    absent = ValueIndex(ABSENT)
    x, old = before or (absent, absent)
    # the last call keeps its streams to itself
    width = instr.attrs["streams"] * instr.inputs[0].dims[-1].elements
    total = lowering.buffer("arena", width, rows=lowering.local_tokens) if instr.attrs["last"] else places[1]
    settings = {"apart": False, "magnitude": 2.0, **instr.attrs}
    del settings["last"]
    lowering.emit(
        "mix_streams",
        x=x,
        y=y,
        old_coefs=old,
        sum=total,
        coefs=absent if instr.attrs["last"] else places[2],
        out=places[0],
        **dict(zip(("fn", "base", "scale"), map(lowering.vector, instr.weights or (None,) * 3), strict=True)),
        **settings,
    )


def _check(name: str, wide: Value, inputs: Values, weights: Weights, count: int) -> None:
    """Raises LayoutError unless all operands are whole, and weights have an element for each of `wide`."""
    for value in inputs:
        unsharded(name, value)
    columns = wide.dims[-1].elements
    if columns % count or any(w.dims[0].elements != columns for w in weights):
        given = ", ".join(map(str, weights))
        raise LayoutError(f"{name}: {count} streams in [{wide.dims[-1]}] do not fit {given or 'it'}")


def normed_streams(x: np.ndarray, weight: np.ndarray, count: int, eps: float) -> np.ndarray:
    """rms_norm of each of the `count` parts of a row, with weights of its own."""
    parts = x.reshape(len(x), count, -1)
    return (parts * inverse_rms(parts, eps)).reshape(x.shape) * weight


def infer_add_streams(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The streams; with a weight also their norm. Raises LayoutError if the operands do not fit together."""
    y, *before = inputs
    count = attrs["streams"]
    wide = before[0] if before else Value("streams", (y.dims[0], Dim("streams", count, y.dims[-1].elements)))
    _check("add_streams", wide, inputs, weights, count)
    per_stream = len(before) != 1
    fits = y.dims[-1].elements * (count if per_stream else 1) == wide.dims[-1].elements
    if not fits or (len(before) > 1 and before[1].dims[-1].elements != count):
        raise LayoutError(f"add_streams: [{y.dims[-1]}] cannot be added to {count} streams in [{wide.dims[-1]}]")
    return [(wide.dims, None)] * (1 + len(weights))


@op("add_streams", infer_add_streams)
def add_streams(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Inputs: y, the streams x, and a coefficient for each stream.

    Stream i becomes x[i] + y * 2 sigmoid(coefficient i). Without coefficients y has a row for each stream; without x
    all streams are y. The second result is the norm of each stream / number of streams.
    """
    y, *before = inputs
    count = attrs["streams"]
    if len(before) != 1:
        factor = 2 / (1 + np.exp(-before[1])) if before else np.ones((len(y), count), y.dtype)
        y = (factor[..., None] * y[:, None]).reshape(len(y), -1)
    x = y + before[0] if before else y
    return [x, *(normed_streams(x, w, count, attrs["eps"]) / np.float32(count) for w in weights)]


@lower("add_streams", "inference")
def lower_add_streams(lowering: ServingLowering, group: Group) -> None:
    instr, absent = group.instr, ValueIndex(ABSENT)
    y, *before = map(lowering.place_of, instr.inputs)
    places = lowering.own_rows(*instr.outputs)
    x, coefs, count = *before, *[absent] * (2 - len(before)), instr.attrs["streams"]
    lowering.emit(
        "add_streams",
        x=x,
        y=y,
        coefs=coefs,
        sum=places[0],
        normed=places[1] if len(places) > 1 else absent,
        norm=lowering.vector(instr.weights[0] if instr.weights else None),
        streams=count,
        eps=instr.attrs["eps"],
        factor=1 / count,
    )


def infer_read_streams(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, width of a stream)."""
    x, gates = inputs
    _check("read_streams", x, inputs, weights, attrs["streams"])
    if gates.dims[-1].elements != x.dims[-1].elements:
        raise LayoutError(f"read_streams: gates [{gates.dims[-1]}] of [{x.dims[-1]}]")
    return [((x.dims[0], attrs["hidden"]), None)]


@op("read_streams", infer_read_streams)
def read_streams(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The sum over streams of sigmoid(gate) * x, for each column."""
    x, gates = inputs
    return [(x / (1 + np.exp(-gates))).reshape(len(x), attrs["streams"], -1).sum(axis=1)]


@lower("read_streams", "inference")
def lower_read_streams(lowering: ServingLowering, group: Group) -> None:
    x, gates = map(lowering.place_of, group.instr.inputs)
    (out,) = lowering.own_rows(*group.instr.outputs)
    lowering.emit("read_streams", x=x, gates=gates, out=out, streams=group.instr.attrs["streams"])


def infer_gate_streams(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The streams, and a row of the same width."""
    x, key, value = inputs
    _check("gate_streams", x, inputs, weights, attrs["streams"])
    if (
        key.dims[-1].elements != x.dims[-1].elements
        or value.dims[-1].elements * attrs["streams"] != x.dims[-1].elements
    ):
        raise LayoutError(f"gate_streams: [{key.dims[-1]}] and [{value.dims[-1]}] do not fit [{x.dims[-1]}]")
    return [(x.dims, None), (x.dims, None)]


@op("gate_streams", infer_gate_streams)
def gate_streams(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """A gate for each stream scales a value that is added to it. The second result is the norm of the scaled value.

    Inputs: the streams x, a key for each stream, a value. Weights: the norms of keys, of x and of the result. With
    s = key . x / sqrt(width), both normed, the gate is sigmoid(sign(s) * sqrt(max(|s|, 1e-6))).
    """
    (x, key, value), (key_norm, query_norm, rows_norm), count = inputs, weights, attrs["streams"]
    normed = lambda x, w: normed_streams(x, w, count, attrs["eps"])
    products = (normed(key, key_norm) * normed(x, query_norm)).reshape(len(x), count, -1)
    score = products.sum(axis=-1) / np.float32(value.shape[1] ** 0.5)
    score = np.sign(score) * np.sqrt(np.maximum(np.abs(score), np.float32(1e-6)))
    added = (value[:, None] / (1 + np.exp(-score[..., None]))).reshape(x.shape)
    return [x + added, normed(added, rows_norm)]


@lower("gate_streams", "inference")
def lower_gate_streams(lowering: ServingLowering, group: Group) -> None:
    """Emits one step. Rows are in a slot if an all_to_all exchanges them."""
    instr, attrs = group.instr, group.instr.attrs
    x, key, value = map(lowering.place_of, instr.inputs)
    total, rows = instr.outputs
    places = {"sum": lowering.own_rows(total)[0], "rows": lowering.result(rows)}
    norms = zip(("key_norm", "query_norm", "rows_norm"), map(lowering.vector, instr.weights), strict=True)
    lowering.emit("gate_streams", x=x, key=key, value=value, **places, **dict(norms), **attrs)


def infer_streams(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of each operand. Raises LayoutError if operands or weights do not fit together."""
    same("altup", *inputs)
    unsharded("altup", inputs[0])
    if weights and weights[1].dims[0].elements % weights[0].dims[0].elements:
        raise LayoutError(f"altup: {weights[1]} is not a row of {weights[0]} for each stream")
    return [(inputs[0].dims, None) for _ in inputs]


def _coefficients(v: np.ndarray, weights: Arrays, eps: float) -> np.ndarray:
    """Returns coefs * tanh(router * rms_norm(v) / width): (tokens, rows of coefs)."""
    norm, router, coefs = weights[:3]
    router = router.reshape(-1, v.shape[-1])
    modalities = np.tanh((v * inverse_rms(v, eps) * norm) @ router.T / np.float32(v.shape[-1]))
    return modalities @ coefs.reshape(-1, len(router)).T


@op("altup_predict", infer_streams)
def altup_predict(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """x[j] + sum over i of c[j, i] * x[i]. Baykal et al. 2023, arXiv:2301.13310, algorithm 1. It has no gradient."""
    c = _coefficients(inputs[0], weights, attrs["eps"]).reshape(-1, len(inputs), len(inputs))
    x = np.stack(inputs, axis=1)  # (tokens, streams, width)
    return list((x + c @ x).swapaxes(0, 1))


@op("altup_correct", infer_streams)
def altup_correct(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """x[j] + (1 + c[j]) * (y - x[0]), then the first of these times a weight. It has no gradient."""
    *x, y = inputs
    c = _coefficients(y, weights, attrs["eps"])
    corrected = [one + (1 + c[:, j : j + 1]) * (y - x[0]) for j, one in enumerate(x)]
    return [*corrected, corrected[0] * weights[3]]


@lower("altup_predict", "inference")
def lower_predict(lowering: ServingLowering, group: Group) -> None:
    inputs, outputs = group.instr.inputs, group.instr.outputs
    _emit(lowering, group, list(inputs), list(outputs), y=ValueIndex(ABSENT), active=ValueIndex(ABSENT))


@lower("altup_correct", "inference")
def lower_correct(lowering: ServingLowering, group: Group) -> None:
    (*x, y), (*outputs, active) = group.instr.inputs, group.instr.outputs
    (place,) = lowering.own_rows(active)
    _emit(lowering, group, x, outputs, y=lowering.place_of(y), active=place)


def _emit(lowering: ServingLowering, group: Group, inputs: list[Value], outputs: list[Value], **operands: Any) -> None:
    places, weights = lowering.own_rows(*outputs), [*map(lowering.vector, group.instr.weights), VectorIndex(ABSENT)]
    lowering.emit(
        "altup",
        count=len(inputs),
        x=[lowering.place_of(value) for value in inputs],
        out=Span(places[0], len(places)),
        **operands,
        **dict(zip(("norm", "router", "coefs", "scale"), weights, strict=False)),
        eps=group.instr.attrs["eps"],
    )


def infer_match_rms(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of each operand, or of one if the mean is wanted."""
    outputs = infer_streams(inputs, weights, attrs)
    return outputs[:1] if attrs.get("mean") else outputs


@op("match_rms", infer_match_rms)
def match_rms(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The first operand, and each other one times rms(first) / rms(it); with `mean` their mean. It has no gradient."""
    first, *others = inputs
    square = lambda x: np.mean(x * x, axis=-1, keepdims=True)
    size = np.sqrt(square(first))
    matched = [first, *(x * size / np.sqrt(np.maximum(square(x), np.float32(attrs["least"]))) for x in others)]
    return [np.mean(matched, axis=0)] if attrs.get("mean") else matched


@lower("match_rms", "inference")
def lower_match_rms(lowering: ServingLowering, group: Group) -> None:
    places = lowering.own_rows(*group.instr.outputs)
    lowering.emit(
        "match_rms",
        count=len(group.instr.inputs),
        x=[lowering.place_of(value) for value in group.instr.inputs],
        out=Span(places[0], len(places)),
        least=group.instr.attrs["least"],
    )


MOST_BLOCKS = 64  # as in runtime/steps/mix_blocks.cpp


def infer_mix_blocks(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the operands, twice. Raises LayoutError if they do not fit together."""
    same("mix_blocks", *inputs)
    unsharded("mix_blocks", inputs[0])
    if attrs["added"] not in (1, 2) or len(inputs) > MOST_BLOCKS or any(w.dims != inputs[0].dims[1:] for w in weights):
        found = f"{', '.join(map(str, weights))} do not fit {len(inputs)} values like %{inputs[0].name}"
        raise LayoutError(f"mix_blocks: {found}")
    return [(inputs[0].dims, None)] * 2


@op("mix_blocks", infer_mix_blocks)
def mix_blocks(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns (sum over i of p[i] * v[i], s). Kimi Team 2026, arXiv:2603.15031. It has no gradient.

    s: the sum of the `added` values and, if `streams`, of the one after them. v: the other operands, then s. p: the
    softmax of proj * norm * v[i] / rms(v[i]).
    """
    own = attrs["added"] + attrs["streams"]
    total = np.sum(inputs[:own], axis=0)
    values = np.stack([*inputs[own:], total])  # (blocks + 1, tokens, hidden)
    vector = np.prod(weights, axis=0)
    square = np.mean(values * values, axis=-1)
    scores = values @ vector / np.sqrt(square + np.float32(attrs["eps"]))
    p = np.exp(scores - scores.max(axis=0))
    return [np.einsum("bt,bth->th", p / p.sum(axis=0), values), total]


@lower("mix_blocks", "inference")
def lower_mix_blocks(lowering: ServingLowering, group: Group) -> None:
    instr, absent = group.instr, ValueIndex(ABSENT)
    own = instr.attrs["added"] + instr.attrs["streams"]
    places = [lowering.place_of(value) for value in instr.inputs]
    out, total = lowering.own_rows(*instr.outputs)
    lowering.emit(
        "mix_blocks",
        count=len(places) - own,
        blocks=places[own:],
        x=places[own - 1] if instr.attrs["streams"] else absent,
        y=places[0],
        z=places[1] if instr.attrs["added"] > 1 else absent,
        sum=total,
        out=out,
        norm=lowering.vector(instr.weights[0] if len(instr.weights) > 1 else None),
        proj=lowering.vector(instr.weight(-1)),
        eps=instr.attrs["eps"],
    )
