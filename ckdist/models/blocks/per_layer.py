"""Parts of layers with per-layer embeddings, and of layers with experts and a dense feed-forward."""

from ckdist.layout import Dim
from ckdist.models.blocks.ffn import dense_ffn
from ckdist.models.blocks.moe import moe_ffn
from ckdist.models.blocks.norm import RowNorm
from ckdist.models.decoder import PER_LAYER
from ckdist.models.spec import DenseFfn, ModelSpec, MoeFfn
from ckdist.program.program import Value
from ckdist.program.tracer import Tracer

GEMMA_NORMS = "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"


def layer_inputs(g: Tracer, ids: Value, x: Value, spec: ModelSpec) -> tuple[Value, ...]:
    """ids: (tokens,), x: (tokens, hidden) embeddings -> the input of each layer, (tokens, width)."""
    p = spec.layer_inputs
    if p is None:
        return ()
    columns, hidden = Dim("layer_inputs", len(spec.layers), p.width), x.dims[-1]
    projected = g.linear(x, g.weight("model.per_layer_model_projection.weight", columns, hidden), names=["per_layer"])
    table = g.weight(PER_LAYER, Dim("vocab", p.rows), columns)
    norm = g.weight("model.per_layer_projection_norm.weight", Dim("layer_input", p.width))
    factors = {"x_factor": hidden.elements**-0.5, "row_factor": p.width**0.5, "factor": 0.5**0.5}
    names = ["input"] * len(spec.layers)
    return g.emit("layer_inputs", (ids, projected), (table, norm), names, eps=spec.norm_eps, **factors)


def end_of_layer(g: Tracer, x: Value, own: Value | None, spec: ModelSpec, path: str, scaled: bool) -> Value:
    """x: (rows, hidden) -> scalar * (x + norm(projection(f(gate x) * own))). own: (rows, width), the layer's input."""
    if own is not None:
        part = input_part(g, x, own, spec, path)
        x = g.add(x, RowNorm(spec.norm, spec.norm_eps)(g, part, f"{path}.post_per_layer_input_norm"))
    if not scaled:
        return x
    (x,) = g.emit("scale_by", (x,), (g.weight(f"{path}.layer_scalar", Dim("scalar", 1)),), ["x"])
    return x


def input_part(g: Tracer, x: Value, own: Value, spec: ModelSpec, path: str) -> Value:
    """projection(f(gate x) * own)."""
    assert spec.layer_inputs is not None
    hidden, width = x.dims[-1], own.dims[-1]
    gate = g.linear(x, g.weight(f"{path}.per_layer_input_gate.weight", width, hidden), names=["gate"])
    act = g.gated(gate, own, spec.layer_inputs.activation)
    return g.linear(act, g.weight(f"{path}.per_layer_projection.weight", hidden, width), names=["per_layer"])


def moe_and_dense(g: Tracer, x: Value, normed: Value, f: MoeFfn, path: str, eps: float) -> Value:
    """norm(dense(normed)) + norm(experts(norm(x))). The router reads x with a norm of its own. x: (rows, hidden)."""
    hidden = x.dims[-1]
    w = lambda name: g.weight(f"{path}.{name}", hidden)
    after_dense, before, after = (w(f"{name}.weight") for name in GEMMA_NORMS)
    dense = dense_ffn(g, normed, DenseFfn(f.dense_size, f.activation), f"{path}.mlp")
    (total,) = g.emit("sum_rows", (dense,), (after_dense,), ["x"], eps=eps)
    routed = g.scale(g.rms_norm(x, w("mlp.gate_norm.weight"), eps), hidden.elements**-0.5)
    experts = moe_ffn(g, g.rms_norm(x, before, eps), f, f"{path}.mlp", routed)
    (total,) = g.emit("sum_rows", (experts, total), (after,), ["x"], eps=eps)
    return total
