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
from ckdist.models.blocks.cross_attention import cross_attention, store_cross
from ckdist.models.blocks.ffn import dense_ffn
from ckdist.models.blocks.gated_delta_net import gated_delta_net
from ckdist.models.blocks.latent_attention import latent_attention
from ckdist.models.blocks.moe import moe_ffn
from ckdist.models.blocks.norm import RowNorm
from ckdist.models.blocks.scorer import scores
from ckdist.models.spec import GatedDeltaNet, LatentAttention, ModelSpec, MoeFfn
from ckdist.program.program import Value, Weight
from ckdist.program.tracer import Tracer, trace
from ckdist.program.training_tracer import TrainingTracer

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
OUTPUT_BIAS = "lm_head.bias"


def block(g: Tracer, x: Value, model: ModelSpec, layer: int, rows: Rows = every) -> Value:
    """One layer: x + mixer(norm(x)), then x + ffn(norm(x)), between both cross-attention, where there is one; of the
    rows that `rows` chooses. x: (tokens, hidden).
    """
    spec, norms = model.layers[layer], RowNorm(model.norm, model.norm_eps)
    path, names, eps = f"{model.root}.layers.{layer}", spec.norms, norms.eps

    def norm(value: Value, name: str | None) -> Value:
        """The norm of this name; nothing where the layer lacks it."""
        return value if name is None else norms(g, value, f"{path}.{name}")

    def add(x: Value, part: Value, name: str | None) -> Value:
        """X and what a part adds to it."""
        return g.add(x, g.scale(norm(part, name), spec.residual_scale))

    normed, mixer, cross = norm(x, names.before_mixer), spec.mixer, spec.cross
    of_mixed, rows = (rows, every) if cross is None else (every, rows)  # where rows are chosen: as late as attention is
    if isinstance(mixer, GatedDeltaNet):
        mixed = gated_delta_net(g, normed, mixer, f"{path}.linear_attn", layer, eps, of_mixed)
    elif isinstance(mixer, LatentAttention):
        mixed = latent_attention(g, normed, mixer, f"{path}.self_attn", layer, eps, of_mixed)
    else:
        mixed = attention(g, normed, mixer, f"{path}.self_attn", layer, eps, of_mixed)
    of_mixer, of_ffn = names.replaces_stream
    x = add(of_mixed(normed if of_mixer else x), mixed, names.after_mixer)
    if cross is not None:
        normed, cache = norm(x, cross.norm), model.first_cross_cache + layer
        mixed = cross_attention(g, normed, cross.attention, f"{path}.cross_attn", cache, rows)
        x = add(rows(normed if cross.replaces_stream else x), mixed, None)
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
    if spec.waves:
        x = g.add(g.embed_waves(ids, spec.waves, x.dims[-1]), x)
    elif spec.positions or spec.token_types:
        rows_of = lambda name, count: g.weight(f"{spec.root}.{name}.weight", Dim("positions", count), x.dims[-1])
        positions = rows_of("embed_positions", spec.positions) if spec.positions else None
        types = rows_of("embed_types", spec.token_types) if spec.token_types else None
        x = g.add(g.embed_positions(ids, positions, types, spec.first_position), x)
    x = g.boundary(x)
    for i in range(len(spec.layers)):
        x = g.boundary(block(g, x, spec, i, rows if i == len(spec.layers) - 1 else every))
    return x


def head(g: Tracer, spec: ModelSpec) -> Weight:
    """The output projection: the embeddings where they are tied."""
    return table(g, spec, EMBEDDING if spec.tie_embeddings else OUTPUT)


def final_norm(g: Tracer, x: Value, spec: ModelSpec) -> Value:
    """The norm behind the last layer: in a post-norm model that with which another one would begin. x: (rows,
    hidden).
    """
    post_norm = spec.layers[-1].norms.replaces_stream[1]
    path = f"{spec.root}.layers.{len(spec.layers)}.input_layernorm" if post_norm else f"{spec.root}.norm"
    return RowNorm(spec.norm, spec.norm_eps)(g, x, path)


def forward(g: Tracer, ids: Value, spec: ModelSpec) -> Value:
    """(tokens,) ids -> (outputs, vocab) logits of the tokens that the batch asks for."""
    x = g.scale(final_norm(g, g.gather(hidden(g, ids, spec, g.select_rows)), spec), spec.logit_scale)
    out = head(g, spec)
    bias = (g.weight(OUTPUT_BIAS, out.dims[0]),) if spec.output_bias else ()
    return g.gather(g.soft_cap(g.linear(x, out, bias=bias, names=["logits"]), spec.logit_soft_cap))


def hidden_rows(g: Tracer, ids: Value, spec: ModelSpec) -> Value:
    """(tokens,) ids -> (outputs, hidden) behind the last norm, of the tokens that the batch asks for; of a
    cross-encoder (outputs, 1).
    """
    x = final_norm(g, g.gather(hidden(g, ids, spec, g.select_rows)), spec)
    return g.output_rows(x if spec.scorer is None else scores(g, x, spec.scorer, spec.norm_eps))


def encode(g: Tracer, ids: Value, spec: ModelSpec) -> Value:
    """(tokens,) ids -> (outputs, hidden) of the encoder, behind its last norm, of the tokens that the batch asks for.
    The keys and values of every layer's cross-attention are then cached.
    """
    encoder = spec.encoder
    if encoder is None:
        raise ConfigError(f"{spec.family} has no encoder")
    x = hidden(g, ids, encoder)
    read = final_norm(g, x, encoder)
    for i, layer in enumerate(spec.layers):
        if layer.cross is not None:
            path = f"{spec.root}.layers.{i}.cross_attn"
            store_cross(g, read, layer.cross.attention, path, spec.first_cross_cache + i)
    return g.output_rows(final_norm(g, g.select_rows(x), encoder))


def hidden_forward(spec: ModelSpec) -> Callable[[Tracer, Value, ModelSpec], Value]:
    """The forward that makes hidden states: of a model with an encoder those of this."""
    return hidden_rows if spec.encoder is None else encode


def main_forward(spec: ModelSpec) -> Callable[[Tracer, Value, ModelSpec], Value]:
    """The forward that reads all of the model's weights, but those of its encoder: of an encoder `hidden_rows`."""
    return forward if spec.generates else hidden_rows


def loss(g: TrainingTracer, ids: Value, targets: Value, spec: ModelSpec) -> Value:
    """(tokens,) ids and targets, -1 where there is none -> the sum of the tokens' losses, over all ranks, with what
    balances the choice of experts.
    """
    if not spec.generates:
        raise ConfigError(f"{spec.family} is an encoder: it can be served, not trained; choose another model")
    if spec.encoder is not None:
        raise ConfigError(f"{spec.family} has an encoder: it can be served, not trained; choose another model")
    x = g.scale(final_norm(g, hidden(g, ids, spec), spec), spec.logit_scale)
    total = g.cross_entropy(x, targets, head(g, spec), spec.logit_soft_cap)
    if spec.balance_coefficient:
        total = g.add(total, g.balance_loss(targets, spec.balance_coefficient))
    return g.reduce(total)


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape, (out, in) or (n,), of every weight that the forward reads; tied embeddings stand there once."""
    forwards = [main_forward(spec), *([] if spec.encoder is None else [encode])]
    weights = [w for one in forwards for w in trace(one, spec, SINGLE, Mesh()).weights]
    return {w.name: tuple(d.elements for d in w.dims) for w in weights}
