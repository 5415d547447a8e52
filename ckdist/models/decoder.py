"""The decoder, once, for every family: embedding, layers, head.

Families differ in the numbers of a `ModelSpec`, not in code; `blocks` has the parts of a layer. Where work is sharded
is the layout's affair: a `g.reduce` stands where a result may be partial, `g.to_heads` where tokens may be sharded, and
both vanish where they are not needed.
"""

from ckdist.layout import SINGLE
from ckdist.mesh import Mesh
from ckdist.models.blocks.attention import Rows, attention, every
from ckdist.models.blocks.ffn import dense_ffn
from ckdist.models.blocks.gated_delta_net import gated_delta_net
from ckdist.models.blocks.latent_attention import latent_attention
from ckdist.models.blocks.moe import moe_ffn
from ckdist.models.spec import GatedDeltaNet, LatentAttention, LayerSpec, ModelSpec, MoeFfn
from ckdist.program.program import Value, Weight
from ckdist.program.tracer import Tracer, TrainingTracer, trace

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"


def block(g: Tracer, x: Value, spec: LayerSpec, layer: int, eps: float, rows: Rows = every) -> Value:
    """One layer: x + mixer(norm(x)), then x + ffn(norm(x)); of the rows that `rows` chooses. x: (tokens, hidden)."""
    path, norms = f"model.layers.{layer}", spec.norms

    def norm(value: Value, name: str | None) -> Value:
        """The norm of this name; nothing where the layer lacks it."""
        return value if name is None else g.rms_norm(value, g.weight(f"{path}.{name}.weight", value.dims[-1]), eps)

    def add(x: Value, part: Value, name: str | None) -> Value:
        """X and what a part adds to it."""
        return g.add(x, g.scale(norm(part, name), spec.residual_scale))

    normed, mixer = norm(x, norms.before_mixer), spec.mixer
    if isinstance(mixer, GatedDeltaNet):
        mixed = gated_delta_net(g, normed, mixer, f"{path}.linear_attn", layer, eps, rows)
    elif isinstance(mixer, LatentAttention):
        mixed = latent_attention(g, normed, mixer, f"{path}.self_attn", layer, eps, rows)
    else:
        mixed = attention(g, normed, mixer, f"{path}.self_attn", layer, eps, rows)
    x = add(rows(x), mixed, norms.after_mixer)
    normed, ffn = norm(x, norms.before_ffn), spec.ffn
    if isinstance(ffn, MoeFfn):
        return add(x, moe_ffn(g, normed, ffn, f"{path}.mlp"), norms.after_ffn)
    return add(x, dense_ffn(g, normed, ffn, f"{path}.mlp"), norms.after_ffn)


def table(g: Tracer, spec: ModelSpec, name: str) -> Weight:
    """A matrix with a row for each token of the vocabulary."""
    return g.weight(name, g.sharding.vocab(spec.vocab_size), g.sharding.hidden(spec.hidden_size))


def hidden(g: Tracer, ids: Value, spec: ModelSpec, rows: Rows = every) -> Value:
    """(tokens,) ids -> (tokens, hidden) after the last layer, not yet normalised.

    `rows` chooses those that the last layer makes.
    """
    x = g.boundary(g.scale(g.reduce(g.embed(ids, table(g, spec, EMBEDDING))), spec.embedding_scale))
    for i, layer in enumerate(spec.layers):
        x = g.boundary(block(g, x, layer, i, spec.norm_eps, rows if i == len(spec.layers) - 1 else every))
    return x


def head(g: Tracer, spec: ModelSpec) -> Weight:
    """The output projection: the embeddings where they are tied."""
    return table(g, spec, EMBEDDING if spec.tie_embeddings else OUTPUT)


def final_norm(g: Tracer, x: Value, spec: ModelSpec) -> Value:
    """What the output projection reads. x: (rows, hidden)."""
    return g.scale(g.rms_norm(x, g.weight("model.norm.weight", x.dims[-1]), spec.norm_eps), spec.logit_scale)


def forward(g: Tracer, ids: Value, spec: ModelSpec) -> Value:
    """(tokens,) ids -> (outputs, vocab) logits of the tokens that the batch asks for."""
    x = final_norm(g, g.gather(hidden(g, ids, spec, g.select_rows)), spec)
    return g.gather(g.soft_cap(g.linear(x, head(g, spec), names=["logits"]), spec.logit_soft_cap))


def loss(g: TrainingTracer, ids: Value, targets: Value, spec: ModelSpec) -> Value:
    """(tokens,) ids and targets, -1 where there is none -> the sum of the tokens' losses, over all ranks, with what
    balances the choice of experts.
    """
    x = final_norm(g, hidden(g, ids, spec), spec)
    total = g.cross_entropy(x, targets, head(g, spec), spec.logit_soft_cap)
    if spec.balance_coefficient:
        total = g.add(total, g.balance_loss(targets, spec.balance_coefficient))
    return g.reduce(total)


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape, (out, in) or (n,), of every weight that the forward reads; tied embeddings stand there once."""
    program = trace(forward, spec, SINGLE, Mesh())
    return {w.name: tuple(d.elements for d in w.dims) for w in program.weights}
