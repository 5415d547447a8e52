"""select_blocks: an indexer of blocks of positions, which chooses those that each kv-head reads.

`TrainingTracer` refuses it: the choice has no gradient.
"""

from dataclasses import replace

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.cache import index_cache
from ckdist.program.ops.op import ServingLowering, lower, op, unsharded
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, RankContext, Values, Weights
from ckdist.program.rotations import NO_ROPE, ROPE_TABLES


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
