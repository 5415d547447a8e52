"""Mamba-1: a short convolution, then a state per channel whose steps are made from all channels."""

from dataclasses import replace

from ckdist.layout import Dim
from ckdist.models.blocks.attention import Rows, all_rows
from ckdist.models.state_mixers import Mamba1
from ckdist.program.program import Value
from ckdist.program.tracer import Tracer


def mamba1(g: Tracer, x: Value, m: Mamba1, path: str, layer: int, eps: float, rows: Rows = all_rows) -> Value:
    """x: (tokens, hidden), normalised -> (rows, hidden).

    `path` is the prefix of the weights' names. `rows` selects the rows whose results are needed.
    """
    w = lambda name, *dims: g.weight(f"{path}.{name}", *dims)
    channels, hidden, eps = m.heads(g.sharding)[0], x.dims[-1], m.norm_eps or eps
    rank, row = Dim("dt_rank", m.dt_rank), Dim("state", m.state_dim)
    parts = {"dt": rank, "b": row, "c": row}
    bias = [w(f"in_proj_{part}.bias", channels) for part in "xz" if m.bias]
    v, z = g.linears(x, [w(f"in_proj_{part}.weight", channels, hidden) for part in "xz"], bias, ["x", "z"])
    kernel = [w("conv1d.weight", replace(channels, width=channels.width * m.conv_kernel))]
    kernel += [w("conv1d.bias", channels)] if m.conv_bias else []
    (u,) = g.stateful("gated_conv", (v,), kernel, ["u"], layer=layer)
    made = g.reduce(g.linear(u, w("x_proj.weight", Dim("scan", m.dt_rank + 2 * m.state_dim), channels), names=["made"]))
    norms = [w(f"{name}_layernorm.weight", dim) for name, dim in parts.items() if m.norms == "weights"]
    more = {"low": rank, "pairs": Dim("b_and_c", 2 * m.state_dim), "eps": eps if m.norms else 0.0}
    low, bc = g.stateful("scan_inputs", (made,), norms, ["low", "bc"], **more)
    dt = g.linear(low, w("dt_proj.weight", channels, rank), names=["dt"])
    vectors = [w("A_log", replace(channels, width=channels.width * m.state_dim)), w("D", channels)]
    vectors.append(w("dt_proj.bias", channels))
    (y,) = g.stateful("selective_scan", (u, z, dt, bc), vectors, ["o"], layer=layer)
    out_bias = (w("out_proj.bias", hidden),) if m.bias else ()
    return g.reduce(g.linear(rows(y), w("out_proj.weight", hidden, channels), bias=out_bias, names=["attn"]))
