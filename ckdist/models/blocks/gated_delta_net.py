"""Linear attention by the gated delta rule: short convolutions, a state per head, gated norms."""

from dataclasses import replace

from ckdist.layout import Dim
from ckdist.models.blocks.attention import Rows, all_rows
from ckdist.models.state_mixers import GatedDeltaNet
from ckdist.program.program import Value
from ckdist.program.tracer import Tracer

L2_EPS = 1e-6  # epsilon of the l2 norms of queries and keys


def gated_delta_net(
    g: Tracer, x: Value, d: GatedDeltaNet, path: str, layer: int, eps: float, rows: Rows = all_rows
) -> Value:
    """x: (tokens, hidden), normalised -> (rows, hidden).

    `path` is the prefix of the weights' names. `rows` selects the rows whose results are needed.
    """
    w = lambda name, *dims: g.weight(f"{path}.{name}", *dims)
    of = lambda dim, width: replace(dim, width=width)
    heads, key_heads = d.heads(g.sharding)
    keys, values, hidden = of(key_heads, d.key_dim), of(heads, d.value_dim), x.dims[-1]
    q, k, v, z, b, a = g.linear(
        x,
        w("in_proj_q.weight", keys, hidden),
        w("in_proj_k.weight", keys, hidden),
        w("in_proj_v.weight", values, hidden),
        w("in_proj_z.weight", values, hidden),
        w("in_proj_b.weight", heads, hidden),
        w("in_proj_a.weight", heads, hidden),
        names=["q", "k", "v", "z", "b", "a"],
    )
    q, k, v, z, b, a = g.to_heads((q, k, v, z, b, a), d.heads)
    own, parts = a.dims[-1], zip("qkv", (q, k, v), strict=True)  # own: the heads, sharded like the states
    taps = lambda x: of(x.dims[-1], x.dims[-1].width * d.conv_kernel)
    kernels = [w(f"conv1d_{name}.weight", taps(x)) for name, x in parts]
    q, k, v = g.stateful("short_conv", (q, k, v), kernels, ["q", "k", "v"], layer=layer)
    (q,) = g.stateful("l2_norm", (q,), (), ["norm"], eps=L2_EPS, scale=d.key_dim**-0.5)
    (k,) = g.stateful("l2_norm", (k,), (), ["norm"], eps=L2_EPS, scale=1.0)
    gates = g.stateful("delta_gates", (a, b), (w("A_log", own), w("dt_bias", own)), ["decay", "beta"])
    (o,) = g.stateful("delta_rule", (q, k, v, *gates), (), ["o"], layer=layer, tiled=d.tiled)
    (o,) = g.stateful("gated_norm", (o, z), (w("norm.weight", Dim("head_dim", d.value_dim)),), ["o"], eps=eps)
    o = rows(g.to_tokens(o, values))
    return g.reduce(g.linear(o, w("out_proj.weight", hidden, values), names=["attn"]))
