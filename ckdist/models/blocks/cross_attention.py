"""Cross-attention: keys and values are made once from the encoder's output; the decoder's tokens attend to them."""

from dataclasses import replace

from ckdist.models.blocks.attention import Rows, all_rows
from ckdist.models.spec import Attention
from ckdist.program.program import Value
from ckdist.program.tracer import Tracer


def store_cross(g: Tracer, x: Value, a: Attention, path: str, cache: int) -> None:
    """Stores keys and values of the encoder's last hidden states x, (tokens, hidden), in a cache."""
    w = lambda name, *dims: g.weight(f"{path}.{name}", *dims)
    heads, keys = g.sharding.heads(a.num_heads, a.num_kv_heads, a.head_dim)
    values, hidden = replace(keys, width=a.value_width), x.dims[-1]
    bias = (w("k_proj.bias", keys), w("v_proj.bias", values)) if a.qkv_bias else ()
    matrices = [w("k_proj.weight", keys, hidden), w("v_proj.weight", values, hidden)]
    k, v = g.linears(x, matrices, bias, ["k", "v"])
    g.store_cross(k, v, heads, layer=cache)


def cross_attention(g: Tracer, x: Value, a: Attention, path: str, cache: int, rows: Rows = all_rows) -> Value:
    """x: (tokens, hidden), normalised -> (rows, hidden). `cache` is that of `store_cross`."""
    w = lambda name, *dims: g.weight(f"{path}.{name}", *dims)
    heads, keys = g.sharding.heads(a.num_heads, a.num_kv_heads, a.head_dim)
    out, hidden = replace(heads, width=a.value_width), x.dims[-1]
    bias = (w("q_proj.bias", heads),) if a.qkv_bias else ()
    q = g.linear(x, w("q_proj.weight", heads, hidden), bias=bias, names=["q"])
    o = rows(g.attend_cross(q, keys, replace(keys, width=a.value_width), layer=cache, scale=a.scale))
    o_bias = (w("o_proj.bias", hidden),) if a.o_bias else ()
    return g.reduce(g.linear(o, w("o_proj.weight", hidden, out), bias=o_bias, names=["attn"]))
