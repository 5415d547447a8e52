"""The layers of a model with residuals by attention over blocks, and its experts of a latent space."""

from collections.abc import Callable, Sequence

from ckdist.layout import Dim
from ckdist.models.blocks.attention import all_rows
from ckdist.models.blocks.ffn import dense_ffn
from ckdist.models.decoder import mix
from ckdist.models.moe_weights import CORRECTION, ROUTER
from ckdist.models.residual_streams import BlockResiduals
from ckdist.models.spec import DenseFfn, Ffn, ModelSpec
from ckdist.program.program import Value
from ckdist.program.tracer import Tracer


def run_blocks(g: Tracer, x: Value, spec: ModelSpec, c: BlockResiduals) -> Value:
    """(tokens, hidden) embeddings -> (tokens, hidden) after the last layer."""
    hidden, eps = x.dims[-1], spec.norm_eps
    blocks: list[Value] = []
    stream: Value | None = None
    added: Sequence[Value] = (x,)

    def mixed(path: str) -> tuple[Value, ...]:
        """The input of the next part, and the stream with the `added` values."""
        weights = [g.weight(f"{path}_{name}.weight", hidden) for name in ("norm", "proj")[not c.normed :]]
        inputs = *added, *([] if stream is None else [stream]), *blocks
        return g.emit(
            "mix_blocks", inputs, weights, ["x", "sum"], added=len(added), streams=stream is not None, eps=eps
        )

    for i, layer in enumerate(spec.layers):
        path = f"{spec.root}.layers.{i}"
        norm = lambda x, name, path=path: g.rms_norm(x, g.weight(f"{path}.{name}.weight", hidden), eps)
        assert layer.mixer is not None and layer.ffn is not None
        x, stream = mixed(f"{path}.self_attention_res")
        if i % c.size == 0:
            blocks, stream = [*blocks, stream], None
        added = [mix(g, norm(x, "input_layernorm"), layer.mixer, path, i, eps, all_rows, None)]
        x, stream = mixed(f"{path}.mlp_res")
        normed = lambda x=x, norm=norm: norm(x, "post_attention_layernorm")
        added = feed_forward(g, normed, layer.ffn, f"{path}.mlp", eps)
        g.boundary(added[-1], *added[:-1], stream, *blocks)
    return mixed(f"{spec.root}.output_attn_res")[0]


def feed_forward(g: Tracer, normed: Callable[[], Value], f: Ffn, path: str, eps: float) -> list[Value]:
    """Values that are added to the stream: of the routed experts and of the shared one, or of a dense feed-forward.

    A decode step keeps activations until its next product, so each reader calls `normed` again.
    """
    if isinstance(f, DenseFfn):
        return [dense_ffn(g, normed(), f, path)]
    x = normed()
    hidden, count = x.dims[-1], Dim("experts", f.num_experts)
    latent = Dim("latent", f.latent) if f.latent else hidden
    w = lambda name, *dims: g.weight(f"{path}.{name}", *dims)
    down = [w("latent_down_proj.weight", latent, hidden)] if f.latent else []
    logits, *low = g.linears(x, [w(ROUTER, count, hidden), *down], names=["router", "low"][: 1 + len(down)])
    correction = w(CORRECTION, count) if f.correction_bias else None
    chosen, shares = g.route([logits], correction, f.routing, False, None, None)
    experts, ffn = g.sharding.experts(f.num_experts), g.sharding.expert_ffn(f.intermediate_size)
    weights = [w(f"experts.{name}_proj.weight", experts, ffn, latent) for name in ("gate", "up")]
    weights.append(w("experts.down_proj.weight", experts, latent, ffn))
    routed = g.reduce(g.experts(low[0] if low else x, chosen, shares, weights, f.activation, []))
    if f.latent_norm:
        routed = g.rms_norm(routed, w("latent_norm.weight", latent), eps)
    if f.latent:
        routed = g.linear(routed, w("latent_up_proj.weight", hidden, latent), names=["routed"])
    if not f.shared_size:
        return [routed]
    return [routed, dense_ffn(g, normed(), DenseFfn(f.shared_size, f.activation), f"{path}.shared_expert")]
