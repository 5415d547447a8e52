"""The mixture of experts: a router, routed experts, and a shared expert that all tokens use."""

from dataclasses import replace

from ckdist.layout import Dim
from ckdist.models.moe_weights import CORRECTION, FACTORS, ROUTER, SHARED_GATE
from ckdist.models.spec import MoeFfn
from ckdist.program.program import Value
from ckdist.program.tracer import Tracer


def moe_ffn(g: Tracer, x: Value, f: MoeFfn, path: str, routed: Value | None = None, ids: Value | None = None) -> Value:
    """x: (tokens, hidden), normalised -> (tokens, hidden). `path` is the prefix of the weights' names.

    `routed`: the input of the router, if that is not x. `ids`: token ids, for a layer that chooses experts by them.
    """
    w = lambda name, *dims: g.weight(f"{path}.{name}", *dims)
    hidden, router = x.dims[-1], w(ROUTER, Dim("experts", f.num_experts), x.dims[-1])
    routers = (router, w(SHARED_GATE, Dim("switch", 1), hidden)) if f.shared_gate else (router,)
    biases = [w("gate.bias", router.dims[0])] if f.bias else []
    logits = g.linears(x if routed is None else routed, routers, biases, names=["router", "switch"][: len(routers)])
    correction = w(CORRECTION, router.dims[0]) if f.correction_bias else None
    factors = w(FACTORS, router.dims[0]) if f.share_factors else None
    entries = Dim("table", f.hashed * f.routing.used)
    table = (ids, w("gate.tid2eid", entries)) if f.hashed and ids is not None else None
    chosen, shares = g.route(logits, correction, f.routing, f.shared_size > 0, factors, table)
    experts, ffn = g.sharding.experts(f.num_experts), g.sharding.expert_ffn(f.intermediate_size)
    # without a gate, relu(up x)^2 = relu(up x) * up x: one matrix in both places
    first, function = ("gate_proj", f.activation) if f.gated else ("up_proj", "relu")
    gate, up = (w(f"experts.{name}.weight", experts, ffn, hidden) for name in (first, "up_proj"))
    weights = [gate, up, w("experts.down_proj.weight", experts, hidden, ffn)]
    if f.shared_size:
        shared = g.sharding.ffn(f.shared_size)
        weights += [w(f"shared_expert.{name}.weight", shared, hidden) for name in (first, "up_proj")]
        weights.append(w("shared_expert.down_proj.weight", hidden, shared))
    given = {"shares_input": f.shares_input, "limits": f.limits, "shared_function": f.shared_activation}
    more = {name: value for name, value in given.items() if value}
    widths = (("gate_proj", ffn), ("up_proj", ffn), ("down_proj", hidden))
    of_experts = [w(f"experts.{name}.bias", replace(experts, width=dim.elements)) for name, dim in widths if f.bias]
    return g.reduce(g.experts(x, chosen, shares, weights, function, of_experts, **more))
