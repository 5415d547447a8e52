"""Attention to compressed entries: select_entries chooses them, attend_compressed reads them and a window of keys.

DeepSeek-AI 2026, DeepSeek-V4, section 2.3. Neither op has a gradient.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.program.cache import CacheArray, LayerCache, latent_cache
from ckdist.program.ops.op import lower, op, unsharded, whole
from ckdist.program.ops.op_types import Attrs, Inferred, Values, Weights
from ckdist.program.program import Instr
from ckdist.program.rotations import ROPE_TABLES
from ckdist.program.step import ABSENT, ValueIndex, VectorIndex

if TYPE_CHECKING:  # these modules import the ops
    from ckdist.program.fusion import Group
    from ckdist.program.lower import ServingLowering

BLOCK_TOKENS = 16
NO_ENTRIES = {**dict.fromkeys(("kv", "gates"), ValueIndex(ABSENT)), "ratio": 0, "overlap": False}


def infer_select_entries(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, index_top_k). Raises LayoutError if a rank lacks tokens or heads, or if the operands do not fit."""
    q, w, kv, gates = inputs
    whole("select_entries", *inputs)
    for value in inputs:
        unsharded("select_entries", value)
    _check("select_entries", inputs, (kv, gates), weights, q.dims[-1].width, attrs)
    if q.dims[-1].count != w.dims[-1].elements or attrs["index_top_k"] < 1:
        raise LayoutError(f"select_entries: queries [{q.dims[-1]}] and weights [{w.dims[-1]}] do not fit together")
    return [((q.dims[0], Dim("index_top_k", attrs["index_top_k"])), None)]


def _check(name: str, inputs: Values, rows: Values, weights: Weights, width: int, attrs: Attrs) -> None:
    """Raises LayoutError if tokens are sharded, or if rows and weights of windows do not fit together."""
    if inputs[0].dims[0].axis is not None:
        raise LayoutError(f"{name}: tokens are sharded over {inputs[0].dims[0].axis}; exchange them first")
    if not rows:
        return
    ratio, columns = attrs["ratio"], width * (1 + attrs["overlap"])
    bias, norm = weights[-2:]
    fits = all(row.dims[-1].elements == columns for row in rows) and norm.dims[0].elements == width
    if not fits or bias.dims[0].elements != ratio * columns or width % max(8, min(ratio, BLOCK_TOKENS)):
        raise LayoutError(f"{name}: windows of {ratio} rows [{rows[0].dims[-1]}] do not make entries of {width}")
    if BLOCK_TOKENS % ratio and ratio % BLOCK_TOKENS:
        raise LayoutError(
            f"{name}: a window of {ratio} tokens neither divides a block of {BLOCK_TOKENS} nor has blocks"
        )


op("select_entries", infer_select_entries, dtypes=("i32",))


def infer_attend_compressed(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The heads of the queries as `groups`. Raises LayoutError if the operands do not fit together."""
    q, k, *rows = inputs
    whole("attend_compressed", *inputs)
    unsharded("attend_compressed", k)
    heads, key, groups = q.dims[-1], k.dims[-1], attrs["groups"]
    if heads.width != key.elements or heads.count % groups or heads.unit % (heads.count // groups):
        raise LayoutError(f"attend_compressed: queries [{heads}], keys [{key}] and {groups} groups do not fit together")
    _check("attend_compressed", inputs, tuple(rows[:2]), weights, key.elements, attrs)
    width = heads.count // groups * heads.width
    return [((q.dims[0], Dim("groups", groups, width, heads.axis)), None)]


op("attend_compressed", infer_attend_compressed)


def _entries(lowering: "ServingLowering", rows: Values, instr: Instr, attrs: Attrs) -> dict[str, Any]:
    """The fields of a `struct ckdist_compression`."""
    if not rows:
        return {**NO_ENTRIES, **dict.fromkeys(("bias", "norm"), VectorIndex(ABSENT))}
    bias, norm = map(lowering.vector, instr.weights[-2:])
    kv, gates = map(lowering.place_of, rows[:2])
    return {"kv": kv, "gates": gates, "bias": bias, "norm": norm, "ratio": attrs["ratio"], "overlap": attrs["overlap"]}


def _arrays(prefix: str, width: int, attrs: Attrs) -> tuple[CacheArray, CacheArray]:
    """The arrays of rows and of entries. An entry lies in the last block of its window."""
    rows = CacheArray(f"{prefix}rows", 1, 2 * width * (1 + attrs["overlap"]))
    return rows, CacheArray(f"{prefix}entries", 1, width // min(attrs["ratio"], BLOCK_TOKENS))


@lower("select_entries", "inference")
def lower_select_entries(lowering: "ServingLowering", group: "Group") -> None:
    """Emits one step, which also extends the index."""
    instr = group.instr
    (q, w, *rows), attrs, heads = instr.inputs, instr.attrs, instr.inputs[0].dims[-1]
    lowering.caches[attrs["layer"]] = LayerCache(_arrays("index_", heads.width, attrs))
    out = lowering.at[instr.outputs[0].name] = lowering.buffer("arena", attrs["index_top_k"])
    lowering.emit(
        "select_entries",
        q=lowering.place_of(q),
        weights=lowering.place_of(w),
        out=out,
        layer=attrs["layer"],
        rope_table=ROPE_TABLES[attrs["rope"]],
        heads=heads.count,
        eps=attrs["eps"],
        entries=_entries(lowering, tuple(rows), instr, attrs),
    )


@lower("attend_compressed", "inference")
def lower_attend_compressed(lowering: "ServingLowering", group: "Group") -> None:
    """Emits one step, which also extends the cache."""
    instr = group.instr
    (q, k, *rows), attrs, heads, key = instr.inputs, instr.attrs, instr.inputs[0].dims[-1], instr.inputs[1].dims[-1]
    layer, width = attrs["layer"], heads.local(lowering.mesh)
    listed = lowering.place_of(rows[2]) if len(rows) > 2 else ValueIndex(ABSENT)
    out = lowering.at[instr.outputs[0].name] = lowering.buffer("arena", width)
    lowering.emit(
        "attend_compressed",
        q=lowering.place_of(q),
        k=lowering.place_of(k),
        rotated=lowering.buffer("arena", width),
        out=out,
        listed=listed,
        norm=lowering.vector(instr.weights[0]),
        sinks=lowering.vector(instr.weights[1]),
        layer=layer,
        rope_table=ROPE_TABLES[attrs["rope"]],
        window=attrs["window"],
        eps=attrs["eps"],
        scale=attrs["scale"],
        entries=_entries(lowering, tuple(rows), instr, attrs),
    )
    cache = latent_cache(heads, key.elements, key.elements, lowering.mesh)
    arrays = (*cache.arrays[:1], *(_arrays("", key.elements, attrs) if rows else ()))
    lowering.caches[layer] = replace(cache, arrays=arrays).with_index(lowering.caches.get(layer))
