"""The layers of a model with several residual streams."""

from collections.abc import Sequence

from ckdist.layout import Dim
from ckdist.models.blocks.attention import all_rows
from ckdist.models.blocks.gated_streams_block import run_gated_streams
from ckdist.models.blocks.moe import moe_ffn
from ckdist.models.decoder import feed_forward, mix
from ckdist.models.gated_fields import GatedStreams
from ckdist.models.residual_streams import HyperConnections
from ckdist.models.spec import ModelSpec, MoeFfn
from ckdist.program.program import Value
from ckdist.program.tracer import Tracer


def run_streams(g: Tracer, ids: Value, x: Value, spec: ModelSpec, c: HyperConnections | GatedStreams) -> Value:
    """(tokens, hidden) embeddings -> (tokens, hidden) after the last layer."""
    if isinstance(c, GatedStreams):
        return run_gated_streams(g, ids, x, spec, c)
    before: Sequence[Value] = ()
    for i, layer in enumerate(spec.layers):
        path, eps = f"{spec.root}.layers.{i}", spec.norm_eps
        assert layer.mixer is not None and layer.ffn is not None and layer.norms.before_ffn and layer.norms.before_mixer
        x, *before = mixed(g, x, before, spec, c, f"{path}.attn_hc.")
        normed = g.rms_norm(x, g.weight(f"{path}.{layer.norms.before_mixer}.weight", x.dims[-1]), eps)
        x = mix(g, normed, layer.mixer, path, i, eps, all_rows, None)
        x, *before = mixed(g, x, before, spec, c, f"{path}.ffn_hc.")
        normed = g.rms_norm(x, g.weight(f"{path}.{layer.norms.before_ffn}.weight", x.dims[-1]), eps)
        if isinstance(layer.ffn, MoeFfn) and layer.ffn.hashed:
            x = moe_ffn(g, normed, layer.ffn, f"{path}.mlp", ids=ids)
        else:
            x = feed_forward(g, x, normed, layer.ffn, path, eps)
        g.boundary(x, *before)
    (x,) = mixed(g, x, before, spec, c, f"{spec.root}.hc_head.hc_", last=True)
    return x


def mixed(
    g: Tracer, y: Value, before: Sequence[Value], spec: ModelSpec, c: HyperConnections, path: str, last: bool = False
) -> tuple[Value, ...]:
    """Adds y to the streams. Returns the input of the next part, the streams, and their coefficients."""
    parts, streams = c.count * (1 if last else 2 if c.apart else c.count + 2), c.count * y.dims[-1].elements
    weight = lambda name, size: g.weight(path + name, Dim(name, size))
    weights = (weight("fn", parts * streams), weight("base", parts), weight("scale", 1 if last else 3 - c.apart))
    weights = () if last and c.mean else weights
    names = ["x"] if last else ["x", "streams", "coefs"]
    own = {"apart": True, "magnitude": c.magnitude} if c.apart else {}
    attrs = {"streams": c.count, "iterations": c.iterations, "eps": c.eps, "norm_eps": spec.norm_eps, "last": last}
    return g.stateful("mix_streams", (y, *before), weights, names, **attrs, **own)
