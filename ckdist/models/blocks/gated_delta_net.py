"""Linear attention by the gated delta rule: short convolutions, a state per head, gated norms."""

from dataclasses import replace

from ckdist.layout import Dim
from ckdist.models.blocks.attention import Rows, all_rows
from ckdist.models.state_mixers import GatedDeltaNet
from ckdist.program.program import Value
from ckdist.program.tracer import Tracer

L2_EPS = 1e-6  # epsilon of the l2 norms of queries and keys


def linear_attention(
    g: Tracer, x: Value, d: GatedDeltaNet, path: str, layer: int, eps: float, rows: Rows = all_rows
) -> Value:
    """`gated_delta_net`, or `kimi_delta_attention`. `path` is the prefix of the layer's names."""
    if d.by_row:
        return kimi_delta_attention(g, x, d, f"{path}.self_attn", layer, eps, rows)
    return gated_delta_net(g, x, d, f"{path}.linear_attn", layer, eps, rows)


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
    outputs = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
    weights = [w(f"in_proj_{name}.weight", dim, hidden) for name, dim in outputs.items()]
    q, k, v, z, b, a = g.linears(x, weights, names=list(outputs))
    q, k, v, z, b, a = g.to_heads((q, k, v, z, b, a), d.heads)
    own, parts = a.dims[-1], zip("qkv", (q, k, v), strict=True)  # own: the heads, sharded like the states
    taps = lambda x: of(x.dims[-1], x.dims[-1].width * d.conv_kernel)
    kernels = [w(f"conv1d_{name}.weight", taps(x)) for name, x in parts]
    q, k, v = g.short_conv(q, k, v, kernels, layer=layer)
    q, k = g.l2_norm(q, L2_EPS, d.key_dim**-0.5), g.l2_norm(k, L2_EPS)
    decay, beta = g.delta_gates(a, b, w("A_log", own), w("dt_bias", own), beta_scale=d.beta_scale)
    o = g.delta_rule(q, k, v, decay, beta, layer=layer, tiled=d.tiled)
    o = g.gated_norm(o, z, w("norm.weight", Dim("head_dim", d.value_dim)), d.norm_eps or eps, d.output_gate)
    o = rows(g.to_tokens(o, values))
    return g.reduce(g.linear(o, w("out_proj.weight", hidden, values), names=["attn"]))


def kimi_delta_attention(
    g: Tracer, x: Value, d: GatedDeltaNet, path: str, layer: int, eps: float, rows: Rows = all_rows
) -> Value:
    """`gated_delta_net` with a decay for each row of a state, and a sigmoid as the output's gate.

    A low rank makes decays and gates, or one matrix each. Kimi Team 2025, arXiv:2510.26692, section 3.
    """
    w = lambda name, *dims: g.weight(f"{path}.{name}", *dims)
    of = lambda dim, width: replace(dim, width=width)
    heads, _ = d.heads(g.sharding)
    keys, values, hidden = of(heads, d.key_dim), of(heads, d.value_dim), x.dims[-1]
    rows_of = {"q": keys, "k": keys, "v": values, "b": heads}
    of_x = [w(f"{name}_proj.weight", dim, hidden) for name, dim in rows_of.items()]
    if d.full_gate:
        low = Dim("gate_rank", d.gate_rank)
        of_gates = w("f_a_proj.weight", low, hidden), w("g_proj.weight", values, hidden)
        low_f, z, q, k, v, b = g.linears(x, [*of_gates, *of_x], names=["f_a", "z", "q", "k", "v", "b"])
        a = g.linear(low_f, w("f_b_proj.weight", keys, low), names=["a"])
    elif d.gate_rank:
        low = Dim("gate_rank", d.gate_rank)
        of_gates = w("f_a_proj.weight", low, hidden), w("g_a_proj.weight", low, hidden)
        low_f, low_g, q, k, v, b = g.linears(x, [*of_gates, *of_x], names=["f_a", "g_a", "q", "k", "v", "b"])
        a = g.linear(low_f, w("f_b_proj.weight", keys, low), names=["a"])
        z = g.linear(low_g, w("g_b_proj.weight", values, low), names=["z"])
    else:
        of_gates = w("g_proj.weight", values, hidden), w("f_proj.weight", keys, hidden)
        z, a, q, k, v, b = g.linears(x, [*of_gates, *of_x], names=["z", "a", "q", "k", "v", "b"])
    if d.full_gate:  # the value that is made last comes first
        a, z, q, k, v, b = g.to_heads((a, z, q, k, v, b), d.heads)
    else:
        z, a, q, k, v, b = g.to_heads((z, a, q, k, v, b), d.heads)
    own = b.dims[-1]  # the heads, sharded like the states
    taps = lambda x: of(x.dims[-1], x.dims[-1].width * d.conv_kernel)
    kernels = [w(f"{name}_conv1d.weight", taps(part)) for name, part in zip("qkv", (q, k, v), strict=True)]
    q, k, v = g.short_conv(q, k, v, kernels, layer=layer)
    q, k = g.l2_norm(q, L2_EPS, d.key_dim**-0.5), g.l2_norm(k, L2_EPS)
    decay, beta = g.delta_gates(a, b, w("A_log", own), w("dt_bias", of(own, d.key_dim)), decay_floor=d.decay_floor)
    o = g.delta_rule(q, k, v, decay, beta, layer=layer, tiled=False)
    o = g.gated_norm(o, z, w("o_norm.weight", Dim("head_dim", d.value_dim)), eps, "sigmoid")
    o = rows(g.to_tokens(o, values))
    return g.reduce(g.linear(o, w("o_proj.weight", hidden, values), names=["attn"]))
