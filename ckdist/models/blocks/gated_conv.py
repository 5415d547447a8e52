"""The gated short convolution of LFM2."""

from dataclasses import replace

from ckdist.models.blocks.attention import Rows, all_rows
from ckdist.models.state_mixers import GatedConv
from ckdist.program.program import Value
from ckdist.program.tracer import Tracer


def gated_conv(g: Tracer, x: Value, d: GatedConv, path: str, layer: int, eps: float, rows: Rows = all_rows) -> Value:
    """x: (tokens, hidden), normalised -> (rows, hidden). There is no norm, so `eps` is unused."""
    del eps
    w = lambda name, *dims: g.weight(f"{path}.{name}", *dims)
    channels, hidden = d.heads(g.sharding)[0], x.dims[-1]
    names = [f"in_proj_{part}" for part in "bcx"]
    bias = [w(f"{name}.bias", channels) for name in names if d.bias]
    parts = g.linears(x, [w(f"{name}.weight", channels, hidden) for name in names], bias, list("bcx"))
    b, c, x = g.to_heads(parts, d.heads)
    own = x.dims[-1]
    kernel = w("conv.weight", replace(own, width=own.width * d.conv_kernel))
    weights = [kernel, w("conv.bias", own)] if d.bias else [kernel]
    (o,) = g.stateful("gated_conv", (b, c, x), weights, ["o"], layer=layer)
    o = rows(g.to_tokens(o, channels))
    out_bias = (w("out_proj.bias", hidden),) if d.bias else ()
    return g.reduce(g.linear(o, w("out_proj.weight", hidden, channels), bias=out_bias, names=["attn"]))
