"""The definitions in numpy of the ops in `ckdist/program/ops/compressed.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference
from tests.support.references.rms_norm import inverse_rms


def rotated(context: RankContext, x: np.ndarray, attrs: Attrs, positions: np.ndarray, back: bool = False) -> np.ndarray:
    """Rotates the last dimensions of x, (positions, ..., width), in neighbouring pairs."""
    rope = context.rope(attrs["rope"])
    angles = positions.astype(np.float32)[:, None] * rope.inverse_frequencies.astype(np.float32)
    angles = angles.reshape(len(x), *[1] * (x.ndim - 2), -1)
    cos, sin = np.cos(angles) * np.float32(rope.magnitude), np.sin(angles) * np.float32(-1 if back else 1)
    sin = sin * np.float32(rope.magnitude)
    first = x.shape[-1] - 2 * angles.shape[-1]
    a, b = x[..., first::2], x[..., first + 1 :: 2]
    pairs = np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return np.concatenate([x[..., :first], pairs.reshape(*x.shape[:-1], -1)], axis=-1)


def entries_of(context: RankContext, kv: np.ndarray, gates: np.ndarray, weights: Arrays, attrs: Attrs) -> np.ndarray:
    """The entries of all complete windows, (windows, width).

    kv, gates: (positions, width), or with `overlap` (positions, 2 * width): for the next window, for the own one.
    """
    (bias, norm), ratio, width = weights, attrs["ratio"], len(weights[1])
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
    entries = entries * inverse_rms(entries, attrs["eps"]) * norm
    return rotated(context, entries, attrs, np.arange(count) * ratio)


def _extended(context: RankContext, key: tuple[int, str], x: np.ndarray) -> np.ndarray:
    """Appends the step's rows to stored ones."""
    context.states[key] = np.concatenate([context.states[key], x]) if key in context.states else x
    return context.states[key]


@reference("select_entries")
def select_entries(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The entries with the largest scores, int32 (tokens, index_top_k), ascending; -1 after the last one.

    score = sum over heads of weight * max(q . entry, 0). A token sees entries of windows that are complete with it.
    q: (tokens, heads * width), weights of heads: (tokens, heads), kv and gates: rows of the tokens.
    """
    q, w, kv, gates = inputs
    layer, top_k = attrs["layer"], attrs["index_top_k"]
    kv, gates = _extended(context, (layer, "index_rows"), kv), _extended(context, (layer, "index_gates"), gates)
    entries = entries_of(context, kv, gates, weights, attrs)
    q = rotated(context, q.reshape(len(q), -1, entries.shape[1]), attrs, context.positions)
    scores = np.einsum("thp,th->tp", np.maximum(np.einsum("thw,pw->thp", q, entries), 0), w)
    out = np.full((len(q), top_k), -1, np.int32)
    for t, row in enumerate(scores):
        seen = (len(kv) - len(q) + t + 1) // attrs["ratio"]
        best = np.sort(np.argsort(-row[:seen], kind="stable")[:top_k])
        out[t, : len(best)] = best
    return [out]


@reference("attend_compressed")
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
    keys, _ = context.extend_cache(layer, k, k)
    first, own = len(keys) - len(q), np.arange(len(keys) - len(q), len(keys))[:, None]
    at = np.arange(len(keys))
    visible = (at <= own) & (at > own - attrs["window"])
    if rows:
        kv, gates = (_extended(context, (layer, name), x) for name, x in zip(("rows", "gates"), rows, strict=False))
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
