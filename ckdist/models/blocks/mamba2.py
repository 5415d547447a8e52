"""Mamba-2: a short convolution, a state per head, and a norm over groups of heads."""

from dataclasses import replace

from ckdist.models.blocks.attention import Rows, all_rows
from ckdist.models.state_mixers import Mamba2
from ckdist.program.program import Value, Weight
from ckdist.program.tracer import Tracer


def group_norm(g: Tracer, x: Value, w: Weight, groups: int, eps: float) -> Value:
    """rms_norm over groups of heads. An all_reduce sums the squares over ranks that share the heads."""
    squares = (g.reduce(g.stateful("head_squares", (x,), (), ["squares"])[0]),) if x.dims[-1].axis else ()
    return g.stateful("group_norm", (x, *squares), (w,), ["norm"], groups=groups, eps=eps)[0]


def mamba2(g: Tracer, x: Value, m: Mamba2, path: str, layer: int, eps: float, rows: Rows = all_rows) -> Value:
    """x: (tokens, hidden), normalised -> (rows, hidden).

    `path` is the prefix of the weights' names. `rows` selects the rows whose results are needed.
    """
    w = lambda name, *dims: g.weight(f"{path}.{name}", *dims)
    heads, groups = m.heads(g.sharding)
    values, keys, hidden = replace(heads, width=m.head_dim), replace(groups, width=m.state_dim), x.dims[-1]
    dims = {"z": values, "x": values, "b": keys, "c": keys, "dt": heads}
    bias = [w(f"in_proj_{part}.bias", dim) for part, dim in dims.items() if m.bias]
    made = g.linears(x, [w(f"in_proj_{part}.weight", dim, hidden) for part, dim in dims.items()], bias, [*dims])
    z, v, b, c, dt = g.to_heads(made, m.heads)
    own = dt.dims[-1]
    convolved = {"c": c.dims[-1], "b": b.dims[-1], "x": v.dims[-1]}
    weights = [w(f"conv1d_{part}.weight", replace(d, width=d.width * m.conv_kernel)) for part, d in convolved.items()]
    weights += [w("A_log", own), w("D", own), w("dt_bias", own)]
    weights += [w(f"conv1d_{part}.bias", d) for part, d in convolved.items() if m.conv_bias]
    attrs = {"layer": layer, "scales": m.scales, "limits": m.dt_limits}
    (y,) = g.stateful("mamba2", (c, b, v, z, dt), weights, ["o"], **attrs)
    y = g.to_tokens(y, values)
    if m.norm_groups:
        y = group_norm(g, y, w("norm.weight", values), m.norm_groups, eps)
    out_bias = (w("out_proj.bias", hidden),) if m.bias else ()
    y = rows(y)
    return g.reduce(g.linear(y, w("out_proj.weight", hidden, values), bias=out_bias, names=["attn"]))
