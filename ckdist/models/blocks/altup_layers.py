"""The layers of a model with alternating updates, per-layer embeddings and a residual of low rank."""

from collections.abc import Sequence

from ckdist.layout import Dim
from ckdist.models.blocks.attention import all_rows, attention
from ckdist.models.blocks.ffn import dense_ffn
from ckdist.models.blocks.per_layer import input_part
from ckdist.models.residual_streams import AltUp
from ckdist.models.spec import DenseFfn, ModelSpec
from ckdist.program.program import Value
from ckdist.program.tracer import Tracer

LEAST = 1e-5  # mean square


def run_layers(g: Tracer, x: Value, spec: ModelSpec, inputs: Sequence[Value], a: AltUp) -> Value:
    """(tokens, hidden) embeddings -> (tokens, hidden) after the last layer. `inputs`: those of the layers."""
    hidden, kept = x.dims[-1], dict[int, tuple[Value, Value]]()
    matrices = lambda name, *dims: [g.weight(f"model.{name}.{i}.weight", *dims) for i in range(a.streams - 1)]
    more = g.linears(x, matrices("altup_projections", hidden, hidden), names=["stream"] * (a.streams - 1))
    streams = g.emit("match_rms", (x, *more), names=["stream"] * a.streams, least=LEAST)
    for i in range(len(spec.layers)):
        streams = layer(g, streams, spec, i, inputs[i], a, kept)
        g.boundary(streams[-1], *streams[:-1], *inputs)  # the last one is made last
    ends = matrices("altup_unembed_projections", hidden, hidden)
    first, *others = streams
    merged = [g.linear(stream, w, names=["stream"]) for stream, w in zip(others, ends, strict=True)]
    (x,) = g.emit("match_rms", (first, *merged), names=["x"], least=LEAST, mean=True)
    return x


def layer(
    g: Tracer,
    streams: Sequence[Value],
    spec: ModelSpec,
    i: int,
    own: Value,
    a: AltUp,
    kept: dict[int, tuple[Value, Value]],
) -> tuple[Value, ...]:
    """One layer. streams: (tokens, hidden) each; own: (tokens, width), the layer's input."""
    one, path, hidden, eps, count = spec.layers[i], f"model.layers.{i}", streams[0].dims[-1], spec.norm_eps, a.streams
    w = lambda name, *dims: g.weight(f"{path}.{name}.weight", *(dims or (hidden,)))
    router = w("altup.router_norm"), w("altup.modality_router", Dim("router", count * hidden.elements))
    coefs = lambda name, rows: w(f"altup.{name}_coefs", Dim("coefs", rows * count))
    names = ["x", *["stream"] * (count - 1)]
    predicted = g.emit("altup_predict", streams, (*router, coefs("prediction", count**2)), names, eps=eps)
    x, rank = predicted[0], Dim("laurel", a.rank)

    def add(x: Value, y: Value, norm: str, factor: float = 1.0) -> Value:
        """Returns factor * (x + norm(y)), in memory."""
        (total,) = g.emit("sum_rows", (y, x), (w(norm),), ["x"], eps=eps, factor=factor)
        return total

    normed = g.rms_norm(x, w("input_layernorm"), eps)
    low = g.linear(normed, w("laurel.linear_left", rank, hidden), names=["laurel"])
    mixed = attention(g, normed, one.attention, f"{path}.self_attn", i, eps, all_rows, kept)
    low = g.linear(low, w("laurel.linear_right", hidden, rank), names=["laurel"])
    total = add(add(x, mixed, "post_attention_layernorm"), low, "laurel.post_laurel_norm")
    total = add(total, x, "input_layernorm", 0.5**0.5)
    assert isinstance(one.ffn, DenseFfn)
    fed = dense_ffn(g, g.rms_norm(total, w("pre_feedforward_layernorm"), eps), one.ffn, f"{path}.mlp")
    y = add(total, fed, "post_feedforward_layernorm")
    scale = g.weight(f"{path}.altup.correct_output_scale", hidden)
    weights = *router, coefs("correction", count), scale
    first, *others, active = g.emit("altup_correct", (*predicted, y), weights, [*names, "active"], eps=eps)
    part = input_part(g, active, own, spec, path)
    return first, *(add(stream, part, "post_per_layer_input_norm") for stream in others)
