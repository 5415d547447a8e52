"""rope and its gradient, and attend (over a cache)."""

from dataclasses import replace
from typing import Any

import numpy as np

from ckdist.errors import LayoutError
from ckdist.mesh import Mesh
from ckdist.program.cache import LayerCache, attention_cache
from ckdist.program.fusion import norm_over_heads
from ckdist.program.ops.elementwise import query_fields
from ckdist.program.ops.op import ServingLowering, TrainingLowering, lower, op, unchanged, vjp
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Group, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr, Value
from ckdist.program.rotations import NO_ROPE, ROPE_TABLES
from ckdist.program.step import ABSENT, ValueIndex


@op("rope", unchanged)
def rope(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Rotates the first dimensions of each head by position * frequency. Su et al. 2021, arXiv:2104.09864."""
    return [rotate(context, inputs[0], attrs, 1)]


@lower("rope", "training")
def lower_rope(lowering: TrainingLowering, instr: Instr) -> None:
    _rotation(lowering, instr, back=False)


def _rotation(lowering: TrainingLowering, instr: Instr, back: bool) -> None:
    fields = {"width": instr.inputs[0].dims[-1].width, "first": instr.attrs.get("first", 0)}
    lowering.emit_rows("rope", instr, "x", table=ROPE_TABLES[instr.attrs["table"]], back=back, **fields)


@vjp("rope")
def rope_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """Rotates the gradient back."""
    return [*g.emit("rope_grad", (grads[0],), names=["d_rope"], **instr.attrs)]


@op("rope_grad", unchanged)
def rope_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Rotates by the negative angle. Yarn's magnitude remains a factor."""
    return [rotate(context, inputs[0], attrs, -1)]


@lower("rope_grad", "training")
def lower_rope_grad(lowering: TrainingLowering, instr: Instr) -> None:
    _rotation(lowering, instr, back=True)


def rotate(context: RankContext, x: np.ndarray, attrs: Attrs, sign: int) -> np.ndarray:
    """Rotates the dimensions of each head, from `first` on, by sign * angle. x: (tokens, heads * head_dim)."""
    rotation, first = context.rope(attrs["table"]), attrs.get("first", 0)
    cos, sin = context.rope_tables(rotation)  # (tokens, rotated / 2)
    c, s, half = cos[:, None], sign * sin[:, None], cos.shape[1]
    heads = x.reshape(len(x), -1, attrs["inputs"][0].dims[-1].width)  # (tokens, heads, head_dim)
    rotated = heads[..., first : first + 2 * half]
    if rotation.interleaved:
        a, b = rotated[..., ::2], rotated[..., 1::2]
        rotated = np.stack([a * c - b * s, b * c + a * s], axis=-1).reshape(rotated.shape)
    else:
        a, b = rotated[..., :half], rotated[..., half:]
        rotated = np.concatenate([a * c - b * s, b * c + a * s], axis=-1)
    parts = [heads[..., :first], rotated, heads[..., first + 2 * half :]]
    return np.concatenate(parts, axis=-1).reshape(x.shape)


def infer_attend(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the queries, with the width of the values. Raises LayoutError if the heads do not fit together."""
    q, k, v = inputs[:3]
    heads, kv_heads = q.dims[-1], k.dims[-1]
    if replace(v.dims[-1], width=kv_heads.width) != kv_heads or heads.width != kv_heads.width:
        raise LayoutError(f"attend: queries [{heads}], keys [{kv_heads}] and values [{v.dims[-1]}] do not fit together")
    if heads.count % kv_heads.count:
        raise LayoutError(f"attend: num_heads ({heads.size}) is not a multiple of num_kv_heads ({kv_heads.size})")
    sinks, relative = (*weights, None, None)[:2]
    if sinks is not None and sinks.dims != (replace(heads, width=1),):
        raise LayoutError(f"attend: queries [{heads}] have a sink for each head, not {sinks}")
    if relative is not None and relative.dims[-1].count != heads.count * attrs["buckets"]:
        raise LayoutError(f"attend: queries [{heads}] have {attrs['buckets']} biases for each head, not {relative}")
    if heads.axis != kv_heads.axis:
        raise LayoutError(
            f"attend: heads are sharded over {heads.axis}, kv_heads over {kv_heads.axis}; shard both or neither"
        )
    return [((q.dims[0], replace(heads, width=v.dims[-1].width)), None)]


def infer_attend_cached(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of `infer_attend`, with listed positions as an optional fourth input."""
    if len(inputs) > 3:
        from ckdist.program.ops.listed import check_listed

        check_listed("attend", inputs[3:], inputs[0], attrs, inputs[1])
    return infer_attend(inputs, weights, attrs)


class Heads:
    """The kv-head of each query head on this rank, and the scores of one head. Shared by attend and its gradient."""

    def __init__(self, context: RankContext, attrs: Attrs, biases: np.ndarray | None = None):
        q_dim, kv_dim = (value.dims[-1] for value in attrs["inputs"][:2])
        self.widths, self.attrs = [value.dims[-1].width for value in attrs["inputs"]], attrs
        group, kv_begin = q_dim.count // kv_dim.count, context.share(kv_dim)[0]
        self.kv_heads = [head // group - kv_begin for head in range(*context.share(q_dim))]
        self.first, self.biases = context.share(q_dim)[0], None
        if biases is not None:
            self.biases = biases.reshape(-1, q_dim.count)

    def split(self, inputs: Arrays, index: int) -> np.ndarray:
        """Reshapes input `index` from (tokens, heads * width) to (tokens, heads, width)."""
        return inputs[index].reshape(len(inputs[index]), -1, self.widths[index])

    def scores(self, q: np.ndarray, k: np.ndarray, first: int = 0, head: int = 0) -> np.ndarray:
        """The scores of local head `head`: (tokens, positions), -inf if a key is not visible.

        q: (tokens, head_dim), at positions from `first` on. k: (positions, head_dim).
        """
        positions, own = np.arange(len(k))[None], first + np.arange(len(q))[:, None]
        scores = q @ k.T * np.float32(self.attrs["scale"])  # (tokens, positions)
        if self.biases is not None:  # (buckets, heads of all ranks)
            from ckdist.program.ops.distance_buckets import bucket_of

            scores = scores + self.biases[bucket_of(positions - own, self.attrs), self.first + head]
        if self.attrs["soft_cap"]:
            scores = self.attrs["soft_cap"] * np.tanh(scores / self.attrs["soft_cap"])
        both, window = self.attrs.get("bidirectional", False), self.attrs["window"]
        visible = (positions <= own) | both
        if window < 0:  # chunks of -window tokens
            visible &= positions >= own // -window * -window
        elif window:
            visible &= (positions > own - window) & (positions < own + window)
        return np.where(visible, scores, -np.inf)


@op("attend", infer_attend_cached)
def attend(context: RankContext, inputs: Arrays, weights: list[np.ndarray | None], attrs: Attrs) -> Arrays:
    """Grouped-query attention over the cache, which the call extends. Vaswani et al. 2017, arXiv:1706.03762.

    It is causal unless `bidirectional`. A fourth input lists the positions that each token sees. The weights are
    optional: sinks, (heads,), and relative biases. A sink is a score per head that adds to the sum of exponentials and
    has no value. Xiao et al. 2023, arXiv:2309.17453; learned sinks: OpenAI 2025, arXiv:2508.10925.
    """
    sinks, biases = (*weights, None, None)[:2]
    heads = Heads(context, attrs, biases)
    q, k, v = (heads.split(inputs, i) for i in range(3))  # (tokens, heads, head_dim)
    layer, (own_k, own_v) = attrs["layer"], (k[:0], v[:0]) if attrs.get("shared") else (k, v)
    # (positions, kv_heads, head_dim) each
    k_all, v_all = context.extended(layer, "keys", own_k), context.extended(layer, "values", own_v)
    out = np.zeros((*q.shape[:2], v.shape[2]), q.dtype)
    seen = np.ones((k.shape[1], 1, 1), bool)
    if len(inputs) > 3:
        from ckdist.program.ops.listed import seen_by

        seen = seen_by(inputs[3], len(k_all), k.shape[1], attrs.get("listed_block", 0))
    for h, kv in enumerate(heads.kv_heads):
        scores = np.where(seen[kv], heads.scores(q[:, h], k_all[:, kv], len(k_all) - len(q), h), -np.inf)
        if sinks is not None:  # one more score, after those of the positions
            scores = np.concatenate([scores, np.full((len(q), 1), sinks[h], scores.dtype)], axis=1)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, h] = (p / p.sum(axis=-1, keepdims=True))[:, : len(k_all)] @ v_all[:, kv]
    return [out.reshape(len(out), -1)]


@lower("attend", "inference")
def lower_attend(lowering: ServingLowering, group: Group) -> None:
    """Emits one step that also computes the norms and the rotation, and extends the cache."""
    instr, attrs = group.instr, group.instr.attrs
    rope, q_norm, k_norm = group["q_rope"], group["q_norm"], group["k_norm"]
    is_rotated_first = q_norm is not None and rope is not None and q_norm.inputs[0] in rope.outputs
    order = ("rope", "norm", "scale") if is_rotated_first else ("norm", "rope", "scale")
    named = zip("qk", instr.inputs, strict=False)
    q, k = (group.before(value, *(f"{name}_{part}" for part in order)) for name, value in named)
    over_heads, is_shared = norm_over_heads(lowering.graph, q), attrs.get("shared", False)
    sinks, relative = (*instr.weights, None, None)[:2]
    (out,) = instr.outputs
    rotated = ValueIndex(ABSENT)
    if lowering.is_exchanged(out):
        rotated = lowering.buffer("arena", instr.inputs[0].dims[-1].local(lowering.mesh))
    place, _ = lowering.head_results(out)
    units = [norm and norm.op == "l2_norm" for norm in (q_norm, group["v_norm"])]
    norms = [lowering.vector(norm.weights[0] if norm and norm.weights else None) for norm in (q_norm, k_norm)]
    if over_heads:
        norms = [lowering.held_vector(w) for w in (over_heads.weight(0), over_heads.weight(1))]
    lowering.emit(
        "attend",
        q=lowering.place_of(q),
        k=ValueIndex(ABSENT) if is_shared else lowering.place_of(k),
        v=ValueIndex(ABSENT) if is_shared else lowering.place_of(group.before(instr.inputs[2], "v_norm")),
        out=place,
        rotated=rotated,
        q_norm=norms[0],
        k_norm=norms[1],
        norms_rotated=is_rotated_first,
        unit_norms=bool(units[0]),
        value_norm=bool(units[1]),
        sinks=lowering.vector(sinks),
        relative=lowering.vector(relative),
        squares=lowering.place_of(over_heads.inputs[2]) if over_heads else ValueIndex(ABSENT),
        layer=attrs["layer"],
        rope_table=ROPE_TABLES[rope.attrs["table"]] if rope else NO_ROPE,
        window=attrs["window"],
        bidirectional=attrs.get("bidirectional", False),
        eps=next((_eps(norm) for norm in (q_norm, over_heads, group["v_norm"]) if norm), 0.0),
        scale=attrs["scale"],
        soft_cap=attrs["soft_cap"],
        **_optional_fields(lowering, instr),
        **query_fields(group["q_scale"]),
    )
    if not is_shared:
        cache = replace(cache_of(instr, lowering.mesh), key_places=lowering.key_places if over_heads else ())
        lowering.caches[attrs["layer"]] = cache.with_index(lowering.caches.get(attrs["layer"]))


def cache_of(attend: Instr, mesh: Mesh) -> LayerCache:
    """The layer's keys and values, as `attend` stores them."""
    heads, keys, values = (value.dims[-1] for value in attend.inputs[:3])
    return attention_cache(heads, keys, values, mesh)


def _optional_fields(lowering: ServingLowering, attend: Instr) -> dict[str, Any]:
    """Fields of the step that only attention over listed positions or blocks, or with relative biases, needs."""
    listed, attrs = lowering.place_of(attend.inputs[3]) if len(attend.inputs) > 3 else ABSENT, attend.attrs
    fields = {"listed": listed, "listed_block": attrs.get("listed_block", 0), "reach": attrs.get("distance", ABSENT)}
    fields["listed_window"] = attrs.get("listed_window", False)
    if "distance" not in attrs:
        return fields
    from ckdist.program.ops.distance_buckets import buckets_by_distance

    return {**fields, "buckets": buckets_by_distance(attrs)}


def _eps(norm: Instr) -> float:
    """The epsilon of a norm's mean of squares."""
    width = norm.inputs[0].dims[-1].width
    return norm.attrs["eps"] / width if norm.op == "l2_norm" else norm.attrs["eps"]
