"""Grouped-query attention with rotary positions, for all families."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from ckdist.layout import Dim
from ckdist.models.spec import Attention
from ckdist.program.program import Value, Weight
from ckdist.program.tracer import Tracer

Rows: TypeAlias = Callable[[Value], Value]  # selects rows of a value


def all_rows(x: Value) -> Value:
    """Returns x: selects all rows."""
    return x


def relative_bias(g: Tracer, a: Attention, path: str, layer: int) -> tuple[Weight, int, int] | None:
    """(weights, number of buckets, largest distance) of the biases by distance; None if the layer has none.

    The weights, (buckets * heads,), are stored in layer 0 for all layers.
    """
    if a.relative is None:
        return None
    table = Dim("relative", a.relative.buckets * a.num_heads)
    first = path.replace(f".layers.{layer}.", ".layers.0.")
    return g.weight(f"{first}.relative_bias.weight", table), a.relative.buckets, a.relative.distance


def attention(
    g: Tracer,
    x: Value,
    a: Attention,
    path: str,
    layer: int,
    eps: float,
    rows: Rows = all_rows,
    kept: dict[int, tuple[Value, Value]] | None = None,
) -> Value:
    """x: (tokens, hidden), normalised -> (rows, hidden).

    `path` is the prefix of the weights' names. `rows` selects the rows whose results are needed. `kept` has the keys
    and values of earlier layers; the layer adds its own.
    """
    kept = {} if kept is None else kept
    w = lambda name, *dims: g.weight(f"{path}.{name}", *dims)
    heads, keys = g.sharding.heads(a.num_heads, a.num_kv_heads, a.head_dim)
    hidden, out = x.dims[-1], replace(heads, width=a.value_width)  # out: columns of o_proj
    rows_of = {
        "q": heads,
        "gate": replace(heads, width=1) if a.head_gates else out,
        "k": keys,
        "v": replace(keys, width=a.value_width),
    }
    if a.indexer:
        width = a.indexer.head_dim
        rows_of |= {"index_q": replace(keys, width=width), "index_k": Dim("index", 1, width)}
    absent = [*(() if a.gated else ("gate",)), *(("k", "v") if a.source is not None else ())]
    names = [name for name in rows_of if name not in absent and not (name == "v" and a.keys_as_values)]
    matrices = [w(f"{name}_proj.weight", rows_of[name], hidden) for name in names]
    bias = [w(f"{name}_proj.bias", rows_of[name]) for name in names] if a.qkv_bias and not a.gated else []
    made = dict(zip(names, g.linears(x, matrices, bias, names), strict=True))
    gates = [made.pop("gate")] if a.gated else []
    if a.qk_norm == "row":
        weights = w("q_norm.weight", heads), w("k_norm.weight", keys)
        made["q"], made["k"] = g.rms_norm_heads(made["q"], made["k"], *weights, eps)
    shared = lambda sharding: sharding.heads(a.num_heads, a.num_kv_heads, a.head_dim)
    made = dict(zip(made, g.to_heads(tuple(made.values()), shared), strict=True))
    q, *own = _placed(g, a, w, [made[name] for name in ("q", "k") if name in made], eps)
    if a.source is None:
        v = made.get("v", made["k"])
        kept[layer] = own[0], g.l2_norm(v, a.value_width * eps, a.value_width**0.5) if a.value_norm else v
    k, v = kept[layer if a.source is None else a.source]
    q = g.scale_queries(q, a.query_scale)
    listed = {}
    if a.indexer:
        from ckdist.models.blocks.block_index import select_blocks

        listed = select_blocks(g, a.indexer, w, made["index_q"], made["index_k"], layer, a.rope, eps)
    sinks = w("sinks", replace(q.dims[-1], width=1)) if a.sinks else None
    scores = {"scale": a.scale, "soft_cap": a.soft_cap, "window": -a.chunk or a.window}
    relative = relative_bias(g, a, path, layer)
    where = {"layer": layer} if a.source is None else {"layer": a.source, "shared": True}
    o = g.attend(q, k, v, sinks, **where, **scores, bidirectional=a.bidirectional, relative=relative, **listed)
    o_bias = (w("o_proj.bias", hidden),) if a.o_bias else ()
    o = g.to_tokens(o, out)
    for gate in gates:
        o = g.gated(gate, o, a.gated)
    o = rows(o)
    result = g.reduce(g.linear(o, w("o_proj.weight", hidden, out), bias=o_bias, names=["attn"]))
    return g.scale(result, a.output_scale)


def _placed(g: Tracer, a: Attention, w: Callable[..., Weight], parts: list[Value], eps: float) -> list[Value]:
    """Norms and rotates queries and, if the layer has its own, keys."""
    if a.rope is not None and a.norms_rotated:
        parts = [g.rope(part, a.rope) for part in parts]
    if a.qk_norm == "head":
        head = Dim("head_dim", a.head_dim)
        parts = [g.rms_norm(part, w(f"{n}_norm.weight", head), eps) for n, part in zip("qk", parts, strict=False)]
    elif a.qk_norm == "unit":
        parts = [g.l2_norm(part, a.head_dim * eps, a.head_dim**0.5) for part in parts]
    if a.rope is not None and not a.norms_rotated:
        parts = [g.rope(part, a.rope) for part in parts]
    return parts
