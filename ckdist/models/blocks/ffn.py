"""The feed-forward part of a layer, gated or not."""

from ckdist.models.spec import DenseFfn
from ckdist.program.program import Value
from ckdist.program.tracer import Tracer


def dense_ffn(g: Tracer, x: Value, f: DenseFfn, path: str) -> Value:
    """x: (tokens, hidden), normalised -> (tokens, hidden). `path` is the prefix of the weights' names."""
    w = lambda name, *dims: g.weight(f"{path}.{name}", *dims)
    ffn, hidden = g.sharding.ffn(f.intermediate_size), x.dims[-1]
    down_bias = (w("down_proj.bias", hidden),) if f.bias else ()
    if f.gated:
        bias = (w("gate_proj.bias", ffn), w("up_proj.bias", ffn)) if f.bias else ()
        weights = w("gate_proj.weight", ffn, hidden), w("up_proj.weight", ffn, hidden)
        gate, up = g.linears(x, weights, bias, ["gate", "up"])
        if f.deviations is not None:
            from ckdist.models.blocks.cut_gate import cut_gate

            gate = cut_gate(g, gate, f.deviations)
        act = g.gated(gate, up, f.activation, f.gate_scale, f.limit)
    else:
        bias = (w("up_proj.bias", ffn),) if f.bias else ()
        act = g.activate(g.linear(x, w("up_proj.weight", ffn, hidden), bias=bias, names=["up"]), f.activation)
    return g.reduce(g.linear(act, w("down_proj.weight", hidden, ffn), bias=down_bias, names=["mlp"]))
