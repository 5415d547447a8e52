"""The decoder or encoder, once, for every family: embedding, layers, head.

Families differ in the numbers of a `ModelSpec`, not in code; `blocks` has the parts of a layer. Where work is sharded
is the layout's affair: a `g.reduce` stands where a result may be partial, `g.to_heads` where tokens may be sharded, and
both vanish where they are not needed.
"""

from collections.abc import Callable

from ckdist.errors import ConfigError
from ckdist.layout import SINGLE, Dim
from ckdist.mesh import Mesh
from ckdist.models.blocks.attention import Rows, attention, every
from ckdist.models.blocks.ffn import dense_ffn
from ckdist.models.blocks.gated_delta_net import gated_delta_net
from ckdist.models.blocks.latent_attention import latent_attention
from ckdist.models.blocks.moe import moe_ffn
from ckdist.models.blocks.norm import RowNorm
from ckdist.models.blocks.scorer import scores
from ckdist.models.spec import GatedDeltaNet, LatentAttention, LayerSpec, ModelSpec, MoeFfn
from ckdist.program.program import Value, Weight
from ckdist.program.tracer import Tracer, TrainingTracer, trace

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
POSITIONS = "model.embed_positions.weight"
TYPES = "model.embed_types.weight"


def block(g: Tracer, x: Value, spec: LayerSpec, layer: int, norms: RowNorm, rows: Rows = every) -> Value:
    """One layer: x + mixer(norm(x)), then x + ffn(norm(x)); of the rows that `rows` chooses. x: (tokens, hidden)."""
    path, names, eps = f"model.layers.{layer}", spec.norms, norms.eps

    def norm(value: Value, name: str | None) -> Value:
        """The norm of this name; nothing where the layer lacks it."""
        return value if name is None else norms(g, value, f"{path}.{name}")

    def add(x: Value, part: Value, name: str | None) -> Value:
        """X and what a part adds to it."""
        return g.add(x, g.scale(norm(part, name), spec.residual_scale))

    normed, mixer = norm(x, names.before_mixer), spec.mixer
    if isinstance(mixer, GatedDeltaNet):
        mixed = gated_delta_net(g, normed, mixer, f"{path}.linear_attn", layer, eps, rows)
    elif isinstance(mixer, LatentAttention):
        mixed = latent_attention(g, normed, mixer, f"{path}.self_attn", layer, eps, rows)
    else:
        mixed = attention(g, normed, mixer, f"{path}.self_attn", layer, eps, rows)
    of_mixer, of_ffn = names.replaces_stream
    x = add(rows(normed if of_mixer else x), mixed, names.after_mixer)
    normed, ffn = norm(x, names.before_ffn), spec.ffn
    x = normed if of_ffn else x
    if isinstance(ffn, MoeFfn):
        return add(x, moe_ffn(g, normed, ffn, f"{path}.mlp"), names.after_ffn)
    return add(x, dense_ffn(g, normed, ffn, f"{path}.mlp"), names.after_ffn)


def table(g: Tracer, spec: ModelSpec, name: str) -> Weight:
    """A matrix with a row for each token of the vocabulary."""
    return g.weight(name, g.sharding.vocab(spec.vocab_size), g.sharding.hidden(spec.hidden_size))


def hidden(g: Tracer, ids: Value, spec: ModelSpec, rows: Rows = every) -> Value:
    """(tokens,) ids -> (tokens, hidden) after the last layer, not yet normalised.

    `rows` chooses those that the last layer makes.
    """
    x = g.scale(g.reduce(g.embed(ids, table(g, spec, EMBEDDING))), spec.embedding_scale)
    if spec.positions or spec.token_types:
        rows_of = lambda name, count: g.weight(name, Dim("positions", count), x.dims[-1]) if count else None
        positions, types = rows_of(POSITIONS, spec.positions), rows_of(TYPES, spec.token_types)
        x = g.add(g.embed_positions(ids, positions, types, spec.first_position), x)
    x, norms = g.boundary(x), RowNorm(spec.norm, spec.norm_eps)
    for i, layer in enumerate(spec.layers):
        x = g.boundary(block(g, x, layer, i, norms, rows if i == len(spec.layers) - 1 else every))
    return x


def head(g: Tracer, spec: ModelSpec) -> Weight:
    """The output projection: the embeddings where they are tied."""
    return table(g, spec, EMBEDDING if spec.tie_embeddings else OUTPUT)


def final_norm(g: Tracer, x: Value, spec: ModelSpec) -> Value:
    """The norm behind the last layer: in a post-norm model that with which another one would begin. x: (rows,
    hidden).
    """
    post_norm = spec.layers[-1].norms.replaces_stream[1]
    path = f"model.layers.{len(spec.layers)}.input_layernorm" if post_norm else "model.norm"
    return RowNorm(spec.norm, spec.norm_eps)(g, x, path)


def forward(g: Tracer, ids: Value, spec: ModelSpec) -> Value:
    """(tokens,) ids -> (outputs, vocab) logits of the tokens that the batch asks for."""
    x = g.scale(final_norm(g, g.gather(hidden(g, ids, spec, g.select_rows)), spec), spec.logit_scale)
    return g.gather(g.soft_cap(g.linear(x, head(g, spec), names=["logits"]), spec.logit_soft_cap))


def hidden_rows(g: Tracer, ids: Value, spec: ModelSpec) -> Value:
    """(tokens,) ids -> (outputs, hidden) behind the last norm, of the tokens that the batch asks for; of a
    cross-encoder (outputs, 1).
    """
    x = final_norm(g, g.gather(hidden(g, ids, spec, g.select_rows)), spec)
    return g.output_rows(x if spec.scorer is None else scores(g, x, spec.scorer, spec.norm_eps))


def main_forward(spec: ModelSpec) -> Callable[[Tracer, Value, ModelSpec], Value]:
    """The forward that reads all of the model's weights: of an encoder `hidden_rows`."""
    return forward if spec.generates else hidden_rows


def loss(g: TrainingTracer, ids: Value, targets: Value, spec: ModelSpec) -> Value:
    """(tokens,) ids and targets, -1 where there is none -> the sum of the tokens' losses, over all ranks, with what
    balances the choice of experts.
    """
    if not spec.generates:
        raise ConfigError(f"{spec.family} is an encoder: it can be served, not trained; choose another model")
    x = g.scale(final_norm(g, hidden(g, ids, spec), spec), spec.logit_scale)
    total = g.cross_entropy(x, targets, head(g, spec), spec.logit_soft_cap)
    if spec.balance_coefficient:
        total = g.add(total, g.balance_loss(targets, spec.balance_coefficient))
    return g.reduce(total)


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape, (out, in) or (n,), of every weight that the forward reads; tied embeddings stand there once."""
    program = trace(main_forward(spec), spec, SINGLE, Mesh())
    return {w.name: tuple(d.elements for d in w.dims) for w in program.weights}
