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


def attention(g: Tracer, x: Value, a: Attention, path: str, layer: int, eps: float, rows: Rows = all_rows) -> Value:
    """x: (tokens, hidden), normalised -> (rows, hidden).

    `path` is the prefix of the weights' names. `rows` selects the rows whose results are needed.
    """
    w = lambda name, *dims: g.weight(f"{path}.{name}", *dims)
    heads, keys = g.sharding.heads(a.num_heads, a.num_kv_heads, a.head_dim)
    values, hidden = replace(keys, width=a.value_width), x.dims[-1]
    bias = (w("q_proj.bias", heads), w("k_proj.bias", keys), w("v_proj.bias", values)) if a.qkv_bias else ()
    matrices = [w("q_proj.weight", heads, hidden), w("k_proj.weight", keys, hidden), w("v_proj.weight", values, hidden)]
    out = replace(heads, width=a.value_width)  # columns of o_proj
    gates: list[Value] = []
    if a.gated:
        matrices.insert(1, w("gate_proj.weight", out, hidden))
        q, *gates, k, v = g.linears(x, matrices, names=["q", "gate", "k", "v"])
    else:
        q, k, v = g.linears(x, matrices, bias, ["q", "k", "v"])
    if a.qk_norm == "row":
        q, k = g.rms_norm_heads(q, k, w("q_norm.weight", heads), w("k_norm.weight", keys), eps)
    q, k, v = g.to_heads((q, k, v), lambda sharding: sharding.heads(a.num_heads, a.num_kv_heads, a.head_dim))
    if a.rope is not None and a.norms_rotated:
        q, k = g.rope(q, a.rope), g.rope(k, a.rope)
    if a.qk_norm == "head":
        head = Dim("head_dim", a.head_dim)
        q = g.rms_norm(q, w("q_norm.weight", head), eps)
        k = g.rms_norm(k, w("k_norm.weight", head), eps)
    if a.rope is not None and not a.norms_rotated:
        q, k = g.rope(q, a.rope), g.rope(k, a.rope)
    q = g.scale_queries(q, a.query_scale)
    sinks = w("sinks", replace(q.dims[-1], width=1)) if a.sinks else None
    scores = {"scale": a.scale, "soft_cap": a.soft_cap, "window": a.window}
    relative = relative_bias(g, a, path, layer)
    o = g.attend(q, k, v, sinks, layer=layer, **scores, bidirectional=a.bidirectional, relative=relative)
    o_bias = (w("o_proj.bias", hidden),) if a.o_bias else ()
    o = g.to_tokens(o, out)
    for gate in gates:
        o = g.gated(gate, o, "sigmoid")
    o = rows(o)
    return g.reduce(g.linear(o, w("o_proj.weight", hidden, out), bias=o_bias, names=["attn"]))
