"""Cross-attention: stores keys and values of the encoder's output in a cache, and attends over all of them."""

from dataclasses import replace

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.cache import attention_cache
from ckdist.program.ops.op import ServingLowering, lower, op
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, RankContext, Values, Weights


def infer_store_cross(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """No outputs. Raises LayoutError if tokens are sharded, or keys and values do not fit together."""
    k, v = inputs
    if k.dims[0].axis is not None:
        raise LayoutError(f"store_cross: tokens are sharded over {k.dims[0].axis}; shard heads")
    if replace(v.dims[-1], width=1) != replace(k.dims[-1], width=1):
        raise LayoutError(f"store_cross: keys [{k.dims[-1]}] and values [{v.dims[-1]}] do not fit together")
    return []


@op("store_cross", infer_store_cross)
def store_cross(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Stores keys and values, (tokens, kv_heads, width) each."""
    k, v = (x.reshape(len(x), -1, of.dims[-1].width) for x, of in zip(inputs, attrs["inputs"], strict=True))
    context.states |= {(attrs["layer"], "keys"): k, (attrs["layer"], "values"): v}
    return []


@lower("store_cross", "inference")
def lower_store_cross(lowering: ServingLowering, group: Group) -> None:
    instr = group.instr
    k, v = instr.inputs
    layer = instr.attrs["layer"]
    lowering.emit("store_cross", k=lowering.place_of(k), v=lowering.place_of(v), layer=layer)
    lowering.caches[layer] = attention_cache(instr.attrs["queries"], k.dims[-1], v.dims[-1], lowering.mesh)


def infer_attend_cross(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the queries, with the width of the values. Raises LayoutError if the heads do not fit together."""
    (q,), keys, values = inputs, attrs["keys"], attrs["values"]
    heads = q.dims[-1]
    if heads.width != keys.width or heads.count % keys.count or heads.axis != keys.axis:
        raise LayoutError(f"attend_cross: queries [{heads}] and keys [{keys}] do not fit together")
    return [((q.dims[0], replace(heads, width=values.width)), None)]


@op("attend_cross", infer_attend_cross)
def attend_cross(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """softmax(scale * q @ k.T) @ v over all cached positions. Vaswani et al. 2017, arXiv:1706.03762."""
    k, v = (context.states[attrs["layer"], name] for name in ("keys", "values"))  # (positions, kv_heads, width)
    heads, keys = attrs["inputs"][0].dims[-1], attrs["keys"]
    q = inputs[0].reshape(len(inputs[0]), -1, heads.width)  # (tokens, heads, width)
    group, first = heads.count // keys.count, context.share(keys)[0]
    out = np.zeros((*q.shape[:2], v.shape[2]), q.dtype)
    for h, head in enumerate(range(*context.share(heads))):
        scores = q[:, h] @ k[:, head // group - first].T * np.float32(attrs["scale"])
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, h] = (p / p.sum(axis=-1, keepdims=True)) @ v[:, head // group - first]
    return [out.reshape(len(out), -1)]


@lower("attend_cross", "inference")
def lower_attend_cross(lowering: ServingLowering, group: Group) -> None:
    instr, attrs = group.instr, group.instr.attrs
    (q,), (o,), layer = instr.inputs, instr.outputs, attrs["layer"]
    out = lowering.buffer("arena", o.dims[-1].local(lowering.mesh))
    lowering.at[o.name] = out
    lowering.emit("attend_cross", q=lowering.place_of(q), out=out, layer=layer, scale=attrs["scale"])
    lowering.caches[layer] = attention_cache(q.dims[-1], attrs["keys"], attrs["values"], lowering.mesh)
