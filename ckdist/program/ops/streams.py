"""mix_streams: hyper-connections. Several streams of hidden states, which a part of a layer reads as one."""

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.program.ops.op import ServingLowering, lower, op, unsharded
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, RankContext, Values, Weights
from ckdist.program.step import ABSENT, ValueIndex

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
    """Emits one step."""
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
