"""Indexers: select_positions chooses the positions that sparse attention reads, select_blocks blocks of them.

DeepSeek-AI 2025, arXiv:2512.02556, section 2.1. Neither has a gradient: `TrainingTracer` refuses them.
"""

from dataclasses import replace

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.program.cache import index_cache
from ckdist.program.ops.op import ServingLowering, lower, op, unsharded
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, RankContext, Values, Weights
from ckdist.program.rotations import NO_ROPE, ROPE_TABLES


def infer_select_positions(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, index_top_k). Raises LayoutError if a rank lacks tokens or heads, or if the operands do not fit."""
    q, k, w = inputs
    for value in inputs:
        unsharded("select_positions", value)
    if q.dims[0].axis is not None:
        raise LayoutError(f"select_positions: tokens are sharded over {q.dims[0].axis}; exchange them first")
    if q.dims[-1].width != k.dims[-1].elements or q.dims[-1].count != w.dims[-1].elements or attrs["index_top_k"] < 1:
        raise LayoutError(f"select_positions: queries [{q.dims[-1]}], keys [{k.dims[-1]}], weights [{w.dims[-1]}]")
    return [((q.dims[0], Dim("index_top_k", attrs["index_top_k"])), None)]


@op("select_positions", infer_select_positions, dtypes=("i32",))
def select_positions(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The positions with the largest scores, int32 (tokens, index_top_k), ascending; -1 after the last one.

    score = sum over heads of weight * max(q . k, 0), over the layer's index keys, which the call extends. Equal scores
    are taken by ascending position.

    q: (tokens, heads * width), k: (tokens, width), weights of heads: (tokens, heads).
    """
    q, k, w = inputs
    keys, top_k = context.extended(attrs["layer"], "index", k), attrs["index_top_k"]  # (positions, width)
    first = len(keys) - len(k)
    dots = np.einsum("thw,pw->thp", q.reshape(len(q), -1, k.shape[1]), keys)
    scores = np.einsum("thp,th->tp", np.maximum(dots, 0), w)
    out = np.full((len(q), top_k), -1, np.int32)
    for t, row in enumerate(scores):
        best = np.sort(np.argsort(-row[: first + t + 1], kind="stable")[:top_k])
        out[t, : len(best)] = best
    return [out]


@lower("select_positions", "inference")
def lower_select_positions(lowering: ServingLowering, group: Group) -> None:
    """Emits one step that also computes the norm of keys and the rotations, and extends the index."""
    instr, norm, q_rope, k_rope = group.instr, group["k_norm"], group["q_rope"], group["k_rope"]
    q, k, w = instr.inputs
    heads, layer = q.dims[-1], instr.attrs["layer"]
    if (q_rope and q_rope.attrs) != (k_rope and k_rope.attrs):
        raise LayoutError(f"cannot lower {instr}: queries and keys have different rotations")
    lowering.caches[layer] = index_cache(k.dims[-1])
    out = lowering.at[instr.outputs[0].name] = lowering.buffer("arena", instr.attrs["index_top_k"])
    lowering.emit(
        "select_positions",
        q=lowering.place_of(group.before(q, "q_rope")),
        k=lowering.place_of(group.before(k, "k_norm", "k_rope")),
        weights=lowering.place_of(w),
        out=out,
        norm=lowering.vector(norm.weights[0] if norm else None),
        norm_bias=lowering.vector(norm.weights[1] if norm else None),
        layer=layer,
        rope_table=ROPE_TABLES[q_rope.attrs["table"]] if q_rope else NO_ROPE,
        rope_first=q_rope.attrs.get("first", 0) if q_rope else 0,
        heads=heads.count,
        eps=norm.attrs["eps"] if norm else 0.0,
    )


def infer_select_blocks(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, kv-heads * top_k). Raises LayoutError if a rank lacks tokens, or if the operands do not fit."""
    q, k = inputs
    unsharded("select_blocks", k)
    if q.dims[0].axis is not None:
        raise LayoutError(f"select_blocks: tokens are sharded over {q.dims[0].axis}; exchange them first")
    if q.dims[-1].width != k.dims[-1].elements or not 0 < attrs["local"] <= attrs["top_k"]:
        raise LayoutError(f"select_blocks: queries [{q.dims[-1]}], keys [{k.dims[-1]}], {attrs['local']} local blocks")
    return [((q.dims[0], replace(q.dims[-1], width=attrs["top_k"])), None)]


@op("select_blocks", infer_select_blocks, dtypes=("i32",))
def select_blocks(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The blocks with the largest scores for each kv-head, int32 (tokens, kv-heads * top_k), ascending; -1 after them.

    score = largest q . k of a block's positions, over the layer's index keys, which the call extends. The last `local`
    blocks up to that of the token are among the chosen ones. MiniMax 2026, MiniMax-M3.

    q: (tokens, kv-heads * width), k: (tokens, width).
    """
    (q, k), block, top_k = inputs, attrs["block"], attrs["top_k"]
    keys = context.extended(attrs["layer"], "index", k)  # (positions, width)
    first = len(keys) - len(k)
    scores = np.einsum("thw,pw->thp", q.reshape(len(q), -1, k.shape[1]), keys)
    out = np.full((*scores.shape[:2], top_k), -1, np.int32)
    for t, heads in enumerate(scores):
        own = (first + t) // block
        for h, row in enumerate(heads):
            best = np.array([row[b * block : min((b + 1) * block, first + t + 1)].max() for b in range(own + 1)])
            best[max(own + 1 - attrs["local"], 0) :] = np.inf
            chosen = np.sort(np.argsort(-best, kind="stable")[:top_k])
            out[t, h, : len(chosen)] = chosen
    return [out.reshape(len(q), -1)]


@lower("select_blocks", "inference")
def lower_select_blocks(lowering: ServingLowering, group: Group) -> None:
    """Emits one step that also computes the norms and the rotations, and extends the index."""
    instr, norms, ropes = group.instr, (group["q_norm"], group["k_norm"]), (group["q_rope"], group["k_rope"])
    if (ropes[0] and ropes[0].attrs) != (ropes[1] and ropes[1].attrs):
        raise LayoutError(f"cannot lower {instr}: queries and keys have different rotations")
    named = zip("qk", instr.inputs, strict=True)
    q, k = (group.before(value, f"{name}_norm", f"{name}_rope") for name, value in named)
    attrs, heads = instr.attrs, instr.inputs[0].dims[-1]
    lowering.caches[attrs["layer"]] = index_cache(instr.inputs[1].dims[-1])
    groups = heads.local(lowering.mesh) // heads.width
    out = lowering.at[instr.outputs[0].name] = lowering.buffer("arena", groups * attrs["top_k"])
    vectors = [lowering.vector(norm.weights[0] if norm else None) for norm in norms]
    lowering.emit(
        "select_blocks",
        q=lowering.place_of(q),
        k=lowering.place_of(k),
        out=out,
        q_norm=vectors[0],
        k_norm=vectors[1],
        layer=attrs["layer"],
        rope_table=ROPE_TABLES[ropes[0].attrs["table"]] if ropes[0] else NO_ROPE,
        groups=groups,
        block=attrs["block"],
        local=attrs["local"],
        eps=norms[0].attrs["eps"] if norms[0] else 0.0,
    )
