"""Latent attention in the absorbed form: the norm of the cached vector, with its gradient, and attention.

A token's key is its latent vector, followed by a rotated part; all heads share both. Its value is the latent vector.
DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.
"""

from dataclasses import replace

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.cache import latent_cache
from ckdist.program.ops.attention_ops import NO_ROPE, ROPE_TABLES
from ckdist.program.ops.elementwise import query_fields
from ckdist.program.ops.listed import check_listed, is_listed
from ckdist.program.ops.op import ServingLowering, TrainingLowering, lower, op, same, unsharded, vjp
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Group, Inferred, RankContext, Values, Weights
from ckdist.program.ops.rms_norm import inverse_rms, lower_norm, norm_gradients
from ckdist.program.program import Instr, Value


def infer_norm_latent(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x. Raises LayoutError if the weights are wider."""
    (x,), (w, *rest) = inputs, weights
    unsharded("norm_latent", x)
    if w.dims[-1].elements > x.dims[-1].elements:
        raise LayoutError(f"norm_latent of [{x.dims[-1]}] has a weight of [{w.dims[-1]}]: {w}")
    if rest and w.dims[-1].elements + rest[0].dims[-1].elements != x.dims[-1].elements:
        raise LayoutError(f"norm_latent of [{x.dims[-1]}] has weights of [{w.dims[-1]}] and [{rest[0].dims[-1]}]")
    return [(x.dims, None)]


@op("norm_latent", infer_norm_latent)
def norm_latent(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """[rms_norm(x[:n]) * w, x[n:]] for a weight of n elements. With a second weight the rest is normed too."""
    (x,), (w, *of_rest) = inputs, weights
    latent, rest = x[:, : len(w)], x[:, len(w) :]
    if of_rest:
        rest = rest * inverse_rms(rest, attrs["eps"]) * of_rest[0]
    return [np.concatenate([latent * inverse_rms(latent, attrs["eps"]) * w, rest], axis=-1)]


@vjp("norm_latent")
def norm_latent_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction for both gradients. Raises LayoutError if the rotated part is normed."""
    if len(instr.weights) > 1:
        raise LayoutError(f"{instr} has no gradient: it norms rotated keys")
    return norm_gradients(g, instr, grads[0], wanted[1], "d_latent")


def infer_norm_latent_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x, and those of the weight if its gradient is wanted."""
    (x, dy), (w,) = inputs, weights
    same("norm_latent_grad", x, dy)
    outputs = infer_norm_latent((x,), weights, attrs)
    return [*outputs, (w.dims, x.dims[0].axis)] if attrs["weight_grad"] else outputs


@lower("norm_latent", "training")
def lower_training_norm_latent(lowering: TrainingLowering, instr: Instr) -> None:
    lower_norm(lowering, instr, instr.weight(0).dims[0].elements)


@op("norm_latent_grad", infer_norm_latent_grad)
def norm_latent_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """rms_norm_grad on the first elements. The gradient of the others is passed on."""
    from ckdist.program.ops.rms_norm_grad import rms_norm_grad

    (x, dy), n = inputs, len(weights[0])
    dx, *dw = rms_norm_grad(context, [x[:, :n], dy[:, :n]], weights, attrs)
    return [np.concatenate([dx, dy[:, n:]], axis=-1), *dw]


@lower("norm_latent_grad", "training")
def lower_norm_latent_grad(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step, which also adds to the gradient of the weight."""
    from ckdist.program.ops.rms_norm_grad import lower_norm_grad

    lower_norm_grad(lowering, instr, instr.weight(0).dims[0].elements)


def infer_attend_latent(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The heads of the queries, with the width of a value. Raises LayoutError if queries and keys differ in width."""
    q, k = inputs[:2]
    check_listed("attend_latent", inputs[2:], q, attrs)
    unsharded("attend_latent", k)
    heads, key = q.dims[-1], k.dims[-1]
    if weights and weights[0].dims != (replace(heads, width=1),):
        raise LayoutError(f"attend_latent: queries [{heads}] have a sink for each head, not {weights[0]}")
    if heads.width != key.elements or not 0 < attrs["value_width"] <= key.elements:
        width = attrs["value_width"]
        raise LayoutError(f"attend_latent: queries [{heads}], keys [{key}] and values of {width} do not fit together")
    return [((q.dims[0], replace(heads, width=attrs["value_width"])), None)]


@op("attend_latent", infer_attend_latent)
def attend_latent(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Causal attention over the cache, which the call extends. Values are the first elements of the keys.

    A third input lists the positions that each token sees. Optional weight: sinks, as in `attend`.
    """
    q, k, *listed = inputs
    keys = context.extended(attrs["layer"], "keys", k)  # (positions, key width)
    heads = q.reshape(len(q), -1, keys.shape[1])  # (tokens, heads, key width)
    scores = np.einsum("thw,pw->htp", heads, keys) * np.float32(attrs["scale"])
    behind = len(keys) - len(q) + np.arange(len(q))[:, None] - np.arange(len(keys))
    visible = (behind >= 0) & (behind < attrs.get("window", len(keys))) & is_listed(listed, len(keys))
    scores = np.where(visible, scores, -np.inf)
    sinks = weights[0][:, None, None] if weights else np.float32(-np.inf)
    most = np.maximum(scores.max(axis=-1, keepdims=True), sinks)
    p = np.exp(scores - most)
    p = p / (p.sum(axis=-1, keepdims=True) + np.exp(sinks - most))
    out = np.einsum("htp,pv->thv", p, keys[:, : attrs["value_width"]])
    return [out.reshape(len(q), -1)]


@lower("norm_latent", "inference")
def lower_norm_latent(lowering: ServingLowering, group: Group) -> None:
    """Raises LayoutError: only attend_latent, which has the norm in its own step, may read a normed latent vector."""
    raise LayoutError(f"cannot lower {group.instr}: only attend_latent norms a latent vector")


@lower("attend_latent", "inference")
def lower_attend_latent(lowering: ServingLowering, group: Group) -> None:
    """Emits one step that also computes the norm and the rotations, and extends the cache."""
    instr, rope, norm = group.instr, group["k_rope"], group["k_norm"]
    q, k, *listed = instr.inputs
    q, k = group.before(q, "q_rope", "q_scale"), group.before(k, "k_norm", "k_rope")
    (out,) = instr.outputs
    place = lowering.at[out.name] = lowering.buffer("arena", out.dims[-1].local(lowering.mesh))
    lowering.emit(
        "attend_latent",
        q=lowering.place_of(q),
        k=lowering.place_of(k),
        out=place,
        norm=lowering.vector(norm.weights[0] if norm else None),
        key_norm=lowering.vector(norm.weights[1] if norm and len(norm.weights) > 1 else None),
        sinks=lowering.vector(instr.weights[0] if instr.weights else None),
        layer=instr.attrs["layer"],
        rope_table=ROPE_TABLES[rope.attrs["table"]] if rope else NO_ROPE,
        window=instr.attrs.get("window", 0),
        eps=norm.attrs["eps"] if norm else 0.0,
        scale=instr.attrs["scale"],
        listed=lowering.place_of(listed[0] if listed else None),
        listed_window=instr.attrs.get("listed_window", 0),
        **query_fields(group["q_scale"]),
    )
    heads, key, rank = q.dims[-1], k.dims[-1], instr.attrs["value_width"]
    cache, layer = latent_cache(heads, key.elements, rank, lowering.mesh), instr.attrs["layer"]
    lowering.caches[layer] = cache.with_index(lowering.caches.get(layer))
