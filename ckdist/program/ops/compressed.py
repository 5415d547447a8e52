"""Attention to compressed entries: select_entries chooses them, attend_compressed reads them and a window of keys.

DeepSeek-AI 2026, DeepSeek-V4, section 2.3. Neither op has a gradient.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.program.cache import CacheArray, LayerCache, latent_cache
from ckdist.program.ops.op import ServingLowering, lower, op, unsharded
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, RankContext, Values, Weights
from ckdist.program.ops.rms_norm import inverse_rms
from ckdist.program.program import Weight
from ckdist.program.rotations import NO_ROPE, ROPE_TABLES
from ckdist.program.step import ABSENT, ValueIndex, VectorIndex
from ckdist.program.step_batch import BLOCK_TOKENS

NO_VECTORS = dict.fromkeys(("bias", "norm", "key_norm", "key_bias"), VectorIndex(ABSENT))
NO_ENTRIES = {
    **dict.fromkeys(("kv", "gates"), ValueIndex(ABSENT)),
    "ratio": 0,
    "overlap": False,
    "front": False,
    **NO_VECTORS,
}


def rotated(context: RankContext, x: np.ndarray, attrs: Attrs, positions: np.ndarray, back: bool = False) -> np.ndarray:
    """Rotates the last dimensions of x, (positions, ..., width), in neighbouring pairs. Means: the first, in halves."""
    if attrs["rope"] is None:
        return x
    rope = context.rope(attrs["rope"])
    angles = positions.astype(np.float32)[:, None] * rope.inverse_frequencies.astype(np.float32)
    angles = angles.reshape(len(x), *[1] * (x.ndim - 2), -1)
    cos, sin = np.cos(angles) * np.float32(rope.magnitude), np.sin(angles) * np.float32(-1 if back else 1)
    sin = sin * np.float32(rope.magnitude)
    if attrs.get("means"):
        a, b, rest = np.split(x, [half := angles.shape[-1], 2 * half], axis=-1)
        return np.concatenate([a * cos - b * sin, a * sin + b * cos, rest], axis=-1)
    first = x.shape[-1] - 2 * angles.shape[-1]
    a, b = x[..., first::2], x[..., first + 1 :: 2]
    pairs = np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return np.concatenate([x[..., :first], pairs.reshape(*x.shape[:-1], -1)], axis=-1)


def means_of(context: RankContext, keys: np.ndarray, norm: np.ndarray, attrs: Attrs) -> np.ndarray:
    """The normed and rotated means of all complete windows, (windows, width)."""
    count = len(keys) // attrs["ratio"]
    means = keys[: count * attrs["ratio"]].reshape(count, attrs["ratio"], -1).mean(axis=1)
    return rotated(context, means * inverse_rms(means, attrs["eps"]) * norm, attrs, np.arange(count) * attrs["ratio"])


def entries_of(context: RankContext, kv: np.ndarray, gates: np.ndarray, weights: Arrays, attrs: Attrs) -> np.ndarray:
    """The entries of all complete windows, (windows, width).

    kv, gates: (positions, width), or with `overlap` (positions, 2 * width): for the next window, for the own one.
    """
    bias, *norm = weights
    ratio, width = attrs["ratio"], kv.shape[1] // (1 + attrs["overlap"])
    count = len(kv) // ratio
    shape = (count, ratio, 1 + attrs["overlap"], width)
    keys = kv[: count * ratio].reshape(shape)
    logits = gates[: count * ratio].reshape(shape) + bias.reshape(shape[1:])
    if attrs["overlap"]:
        before = lambda x, value: np.concatenate([np.full_like(x[:1, :, 0], value), x[:-1, :, 0]])
        keys = np.concatenate([before(keys, 0), keys[:, :, 1]], axis=1)
        logits = np.concatenate([before(logits, -np.inf), logits[:, :, 1]], axis=1)
    else:
        keys, logits = keys[:, :, 0], logits[:, :, 0]
    if not count:
        return np.zeros((0, width), np.float32)
    terms = np.exp(logits - logits.max(axis=1, keepdims=True))  # (windows, rows, width)
    entries = (keys * terms / terms.sum(axis=1, keepdims=True)).sum(axis=1)
    for weight in norm:
        entries = entries * inverse_rms(entries, attrs["eps"]) * weight
    return rotated(context, entries, attrs, np.arange(count) * ratio)


def infer_select_entries(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, listed). Raises LayoutError if a rank lacks tokens or heads, or if the operands do not fit."""
    q, *w = inputs[:-1] if attrs.get("means") else inputs[:-2]
    for value in inputs:
        unsharded("select_entries", value)
    _check("select_entries", inputs, inputs[1 + len(w) :], weights, q.dims[-1].width, attrs)
    if any(q.dims[-1].count != one.dims[-1].elements for one in w) or attrs["index_top_k"] < 1:
        raise LayoutError(f"select_entries: queries [{q.dims[-1]}] and weights [{w[0].dims[-1]}] do not fit together")
    return [((q.dims[0], Dim("index_top_k", listed_width(attrs))), None)]


def listed_width(attrs: Attrs) -> int:
    """Numbers of a token's list: of entries, or of positions."""
    top_k, ratio = attrs["index_top_k"], attrs["ratio"]
    return top_k * ratio + ratio - 1 if attrs.get("positions") else top_k


def _check(name: str, inputs: Values, rows: Values, weights: Weights, width: int, attrs: Attrs) -> None:
    """Raises LayoutError if tokens are sharded, or if rows and weights of windows do not fit together."""
    if inputs[0].dims[0].axis is not None:
        raise LayoutError(f"{name}: tokens are sharded over {inputs[0].dims[0].axis}; exchange them first")
    if not rows:
        return
    ratio, columns = attrs["ratio"], width * (1 + attrs["overlap"])
    bias, norm = ((), weights) if attrs.get("means") else (weights[:1], weights[1:])
    fits = all(row.dims[-1].elements == columns for row in rows) and all(w.dims[0].elements == width for w in norm)
    if not fits or any(w.dims[0].elements != ratio * columns for w in bias) or width % max(8, min(ratio, BLOCK_TOKENS)):
        raise LayoutError(f"{name}: windows of {ratio} rows [{rows[0].dims[-1]}] do not make entries of {width}")
    if BLOCK_TOKENS % ratio and ratio % BLOCK_TOKENS:
        raise LayoutError(
            f"{name}: a window of {ratio} tokens neither divides a block of {BLOCK_TOKENS} nor has blocks"
        )


@op("select_entries", infer_select_entries, dtypes=("i32",))
def select_entries(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The entries with the largest scores, int32 (tokens, index_top_k), ascending; -1 after the last one.

    score = sum over heads of weight * max(q . entry, 0). A token sees entries of windows that are complete with it.
    With `positions` the list has the positions of these windows, and those of the last, incomplete one.
    q: (tokens, heads * width), weights of heads: (tokens, heads), kv and gates: rows of the tokens. With `means` there
    are no weights of heads and no gates: an entry is the mean of its window.
    """
    layer, top_k = attrs["layer"], attrs["index_top_k"]
    if attrs.get("means"):
        (q, kv), (norm,) = inputs, weights
        kv, w = context.extended(layer, "index_rows", kv), np.ones((len(q), 1), q.dtype)
        entries = means_of(context, kv, norm, attrs)
    else:
        q, w, kv, gates = inputs
        kv, gates = context.extended(layer, "index_rows", kv), context.extended(layer, "index_gates", gates)
        entries = entries_of(context, kv, gates, weights, attrs)
    q = rotated(context, q.reshape(len(q), -1, entries.shape[1]), attrs, context.positions)
    scores = (np.maximum(np.einsum("thw,pw->thp", q, entries), 0) * w[..., None]).sum(axis=1)
    out, ratio = np.full((len(q), listed_width(attrs)), -1, np.int32), attrs["ratio"]
    for t, row in enumerate(scores):
        count = len(kv) - len(q) + t + 1
        best = np.sort(np.argsort(-row[: count // ratio], kind="stable")[:top_k])
        if attrs.get("positions"):
            best = np.append(best[:, None] * ratio + np.arange(ratio), np.arange(count // ratio * ratio, count))
        out[t, : len(best)] = best
    return [out]


def infer_attend_compressed(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The heads of the queries as `groups`. Raises LayoutError if the operands do not fit together."""
    q, k, *rows = inputs
    unsharded("attend_compressed", k)
    heads, key, groups = q.dims[-1], k.dims[-1], attrs["groups"]
    if heads.width != key.elements or heads.count % groups or heads.unit % (heads.count // groups):
        raise LayoutError(f"attend_compressed: queries [{heads}], keys [{key}] and {groups} groups do not fit together")
    _check("attend_compressed", inputs, tuple(rows[:2]), weights[2:], key.elements, attrs)
    width = heads.count // groups * heads.width
    return [((q.dims[0], Dim("groups", groups, width, heads.axis)), None)]


@op("attend_compressed", infer_attend_compressed)
def attend_compressed(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Attention of each head to the last `window` keys and to entries, with sinks. A key is its own value.

    q: (tokens, heads * width), normed per head without weights, k: (tokens, width), then kv and gates: the rows that
    make entries; both are absent if the layer has none. A fifth input lists the entries that each token sees.
    Weights: the norm of k, sinks (heads,), the bias and the norm of entries. The last dimensions of q and k are
    rotated, those of the result are rotated back.
    """
    q, k, *rows = inputs
    norm, sinks, *of_entries = weights
    layer, width = attrs["layer"], k.shape[1]
    k = rotated(context, k * inverse_rms(k, attrs["eps"]) * norm, attrs, context.positions)
    keys = context.extended(layer, "keys", k)
    first, own = len(keys) - len(q), np.arange(len(keys) - len(q), len(keys))[:, None]
    at = np.arange(len(keys))
    visible = (at <= own) & (at > own - attrs["window"])
    if rows:
        kv, gates = (context.extended(layer, name, x) for name, x in zip(("rows", "gates"), rows, strict=False))
        entries = entries_of(context, kv, gates, of_entries, attrs)
        seen = np.arange(len(entries)) < (own + 1) // attrs["ratio"]
        if len(rows) > 2:
            seen &= np.stack([np.isin(np.arange(len(entries)), listed) for listed in rows[2]])
        keys, visible = np.concatenate([keys, entries]), np.concatenate([visible, seen], axis=1)
    heads = q.reshape(len(q), -1, width)
    heads = rotated(context, heads * inverse_rms(heads, attrs["eps"]), attrs, first + np.arange(len(q)))
    scores = np.einsum("thw,pw->thp", heads, keys) * np.float32(attrs["scale"])
    scores = np.where(visible[:, None], scores, -np.inf)
    most = np.maximum(scores.max(axis=-1), sinks)[..., None]
    p = np.exp(scores - most)
    p = p / (p.sum(axis=-1, keepdims=True) + np.exp(sinks[:, None] - most))
    out = rotated(context, np.einsum("thp,pw->thw", p, keys), attrs, first + np.arange(len(q)), back=True)
    return [out.reshape(len(q), -1)]


def _entries(lowering: ServingLowering, rows: Values, weights: Sequence[Weight | None], attrs: Attrs) -> dict[str, Any]:
    """The fields of a `struct ckdist_compression`."""
    if not rows:
        return NO_ENTRIES
    means = attrs.get("means", False)
    of_entries = zip(("norm",) if means else ("bias", "norm"), map(lowering.vector, weights), strict=False)
    kv, gates = [*map(lowering.place_of, rows[:2]), ValueIndex(ABSENT)][:2]
    sizes = {name: attrs[name] for name in ("ratio", "overlap")}
    return {**NO_VECTORS, "kv": kv, "gates": gates, "front": means, **sizes, **dict(of_entries)}


def _arrays(prefix: str, width: int, attrs: Attrs) -> tuple[CacheArray, CacheArray]:
    """The arrays of the last rows and of entries. An entry lies in the last block of its window."""
    parts = 1 + attrs["overlap"]
    row = width * parts * (1 if attrs.get("means") else 2)
    rows = CacheArray(f"{prefix}rows", 1, row, attrs["ratio"] * parts, "sequence")
    return rows, CacheArray(f"{prefix}entries", 1, width // min(attrs["ratio"], BLOCK_TOKENS))


@lower("select_entries", "inference")
def lower_select_entries(lowering: ServingLowering, group: Group) -> None:
    """Emits one step, which also norms keys and extends the index."""
    instr, norm, q_norm = group.instr, group["key_norm"], group["q_norm"]
    attrs, heads, q = instr.attrs, instr.inputs[0].dims[-1], group.before(instr.inputs[0], "q_norm")
    w, rows = (None, instr.inputs[1:]) if attrs.get("means") else (instr.inputs[1], instr.inputs[2:])
    lowering.caches[attrs["layer"]] = LayerCache(_arrays("index_", heads.width, attrs))
    out = lowering.at[instr.outputs[0].name] = lowering.buffer("arena", listed_width(attrs))
    entries = _entries(lowering, (norm.inputs[0], *rows[1:]) if norm else rows, instr.weights, attrs)
    if norm:
        entries |= dict(zip(("key_norm", "key_bias"), map(lowering.vector, norm.weights), strict=True))
    lowering.emit(
        "select_entries",
        q=lowering.place_of(q),
        weights=lowering.place_of(w),
        out=out,
        q_norm=lowering.vector(q_norm.weights[0] if q_norm else None),
        layer=attrs["layer"],
        rope_table=ROPE_TABLES[attrs["rope"]] if attrs["rope"] else NO_ROPE,
        heads=heads.count,
        positions=bool(attrs.get("positions")),
        eps=norm.attrs["eps"] if norm else attrs["eps"],
        entries=entries,
    )


@lower("attend_compressed", "inference")
def lower_attend_compressed(lowering: ServingLowering, group: Group) -> None:
    """Emits one step, which also extends the cache."""
    instr = group.instr
    (q, k, *rows), attrs, heads, key = instr.inputs, instr.attrs, instr.inputs[0].dims[-1], instr.inputs[1].dims[-1]
    layer, width = attrs["layer"], heads.local(lowering.mesh)
    listed = lowering.place_of(rows[2] if len(rows) > 2 else None)
    out = lowering.at[instr.outputs[0].name] = lowering.buffer("arena", width)
    lowering.emit(
        "attend_compressed",
        q=lowering.place_of(q),
        k=lowering.place_of(k),
        rotated=lowering.buffer("arena", width),
        keys=lowering.buffer("arena", key.elements),
        out=out,
        listed=listed,
        norm=lowering.vector(instr.weights[0]),
        sinks=lowering.vector(instr.weights[1]),
        layer=layer,
        rope_table=ROPE_TABLES[attrs["rope"]],
        window=attrs["window"],
        eps=attrs["eps"],
        scale=attrs["scale"],
        entries=_entries(lowering, tuple(rows), instr.weights[2:], attrs),
    )
    cache = latent_cache(heads, key.elements, key.elements, lowering.mesh)
    keys = replace(cache.arrays[0], rows=attrs["window"], lifetime="sequence")
    arrays = (keys, *(_arrays("", key.elements, attrs) if rows else ()))
    lowering.caches[layer] = replace(cache, arrays=arrays).with_index(lowering.caches.get(layer))
