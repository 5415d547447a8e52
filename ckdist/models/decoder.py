"""The forward of decoders and encoders, for all families: embedding, layers, head.

Families differ in the numbers of a `ModelSpec`, not in code; `blocks` has the parts of a layer. The layout decides the
sharding. The forward calls `g.reduce` if a result may be partial, and `g.to_heads` if tokens may be sharded. Both emit
nothing in a layout that does not need them.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ckdist.layout import SINGLE, Dim
from ckdist.mesh import Mesh
from ckdist.models.blocks.attention import Rows, all_rows, attention
from ckdist.models.blocks.ffn import dense_ffn
from ckdist.models.blocks.norm import RowNorm
from ckdist.models.spec import Attention, DenseFfn, Ffn, Mixer, ModelSpec
from ckdist.program.program import Value, Weight
from ckdist.program.tracer import Tracer, trace

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
PER_LAYER, NGRAMS = "model.embed_tokens_per_layer.weight", "model.embed_ngrams.weight"
MAPPED = PER_LAYER, NGRAMS  # read by rows in their files, never packed
OUTPUT_BIAS = "lm_head.bias"
SCORE = "score.weight"  # the head of a reward model
Kept: TypeAlias = dict[int, tuple[Value, Value]]
BLOCKS = {  # mixer -> (its file in `blocks`, its function, prefix of its weights)
    "GatedConv": ("gated_conv", "gated_conv", ".conv"),
    "GatedDeltaNet": ("gated_delta_net", "linear_attention", ""),
    "CompressedAttention": ("compressed_attention", "compressed_attention", ".self_attn"),
    "LatentAttention": ("latent_attention", "latent_attention", ".self_attn"),
    "Mamba1": ("mamba1", "mamba1", ".mamba"),
    "Mamba2": ("mamba2", "mamba2", ".mamba"),
}


def projection(index: int) -> str:
    """The name of a dense layer's matrix after the last norm."""
    return f"model.projection_{index}.weight"


def block(
    g: Tracer,
    x: Value,
    model: ModelSpec,
    layer: int,
    rows: Rows = all_rows,
    kept: dict[int, tuple[Value, Value]] | None = None,
    inputs: Sequence[Value] = (),
) -> Value:
    """One layer: x + mixer(norm(x)), then cross-attention if there is one, then x + ffn(norm(x)).

    x: (tokens, hidden) -> (rows, hidden), for the rows that `rows` selects.

    `kept`: keys and values of earlier layers. `inputs`: the layers' inputs, if the model has per-layer embeddings.
    """
    spec, norms = model.layers[layer], RowNorm(model.norm, model.norm_eps)
    path, names, eps = f"{model.root}.layers.{layer}", spec.norms, norms.eps
    after = RowNorm(model.norm, names.after_eps or eps)

    def norm(value: Value, name: str | None, norms: RowNorm = norms) -> Value:
        """Applies the norm `name`; returns `value` if that is None."""
        return value if name is None else norms(g, value, f"{path}.{name}")

    def add(x: Value, part: Value, name: str | None) -> Value:
        """Returns x + residual_scale * norm(part)."""
        return g.add(x, g.scale(norm(part, name, after), spec.residual_scale))

    cross, ffn, before = spec.cross, spec.ffn, x
    select_rows = rows if cross is None else all_rows  # the last attention of a layer selects rows
    parts = [] if spec.mixer is None else getattr(spec.mixer, "parts", [(spec.mixer, 1.0)])
    x = x if parts else select_rows(x)
    for at, (part, factor) in enumerate(parts, 1):
        # A decode step keeps activations until its next product, so each part has a norm of its own. The last part
        # selects rows: steps of all tokens come before those of selected ones.
        choose, normed = select_rows if at == len(parts) else all_rows, norm(before, names.before_mixer)
        mixed = mix(g, normed, part, path, layer, eps, choose, kept)
        x = choose(normed if names.replaces_stream[0] else x)
        if spec.parallel or at < len(parts):
            x = g.join(x, mixed, factor * spec.residual_scale)
        else:
            x = add(x, g.scale(mixed, factor), names.after_mixer)
    if cross is not None:
        from ckdist.models.blocks.cross_attention import cross_attention

        normed, cache = norm(x, cross.norm), model.first_cross_cache + layer
        mixed = cross_attention(g, normed, cross.attention, f"{path}.cross_attn", cache, rows)
        x = add(rows(normed if cross.replaces_stream else x), mixed, None)
    if ffn is not None:
        normed = norm(select_rows(before), names.before_mixer) if spec.parallel else norm(x, names.before_ffn)
        x = normed if names.replaces_stream[1] else x
        x = add(x, feed_forward(g, x, normed, ffn, path, eps), names.after_ffn)
    if not inputs and not spec.scalar:
        return x
    from ckdist.models.blocks.per_layer import end_of_layer

    return end_of_layer(g, x, rows(inputs[layer]) if inputs else None, model, path, spec.scalar)


def mix(g: Tracer, x: Value, mixer: Mixer, path: str, layer: int, eps: float, rows: Rows, kept: Kept | None) -> Value:
    """One part of a mixer. x: (tokens, hidden), normalised -> (rows, hidden)."""
    if isinstance(mixer, Attention):
        return attention(g, x, mixer, f"{path}.self_attn", layer, eps, rows, kept)
    file, name, prefix = BLOCKS[type(mixer).__name__]
    block = getattr(importlib.import_module(f"ckdist.models.blocks.{file}"), name)
    return block(g, x, mixer, path + prefix, layer, eps, rows)


def feed_forward(g: Tracer, x: Value, normed: Value, ffn: Ffn, path: str, eps: float) -> Value:
    """The feed-forward of a layer. x: (rows, hidden); `normed`: its norm."""
    if isinstance(ffn, DenseFfn):
        return g.scale(dense_ffn(g, normed, ffn, f"{path}.mlp"), ffn.scale)
    if not ffn.dense_size:
        from ckdist.models.blocks.moe import moe_ffn

        return g.scale(moe_ffn(g, normed, ffn, f"{path}.mlp"), ffn.scale)
    from ckdist.models.blocks.per_layer import moe_and_dense

    return moe_and_dense(g, x, normed, ffn, path, eps)


def table(g: Tracer, spec: ModelSpec, name: str) -> Weight:
    """The matrix `name` with a row for each token of the vocabulary."""
    return g.weight(name, g.sharding.vocab(spec.vocab_size), g.sharding.hidden(spec.hidden_size))


def hidden(g: Tracer, ids: Value, spec: ModelSpec, rows: Rows = all_rows) -> Value:
    """(tokens,) ids -> (rows, hidden) after the last layer, before the final norm. `rows` selects in the last layer."""
    x = g.scale(g.reduce(g.embed(ids, table(g, spec, EMBEDDING), spec.embedding_eps)), spec.embedding_scale)
    if spec.waves:
        x = g.add(g.embed_waves(ids, spec.waves, x.dims[-1]), x)
    elif spec.positions or spec.token_types:
        rows_of = lambda name, count: g.weight(f"{spec.root}.{name}.weight", Dim("positions", count), x.dims[-1])
        positions = rows_of("embed_positions", spec.positions) if spec.positions else None
        types = rows_of("embed_types", spec.token_types) if spec.token_types else None
        x = g.add(g.embed_positions(ids, positions, types, spec.first_position), x)
    x, kept, inputs = g.boundary(x), dict[int, tuple[Value, Value]](), ()
    if spec.layer_inputs:
        from ckdist.models.blocks.per_layer import layer_inputs

        inputs = layer_inputs(g, ids, x, spec)
    if spec.altup:
        from ckdist.models.blocks.altup_layers import run_layers

        return rows(run_layers(g, x, spec, inputs, spec.altup))
    if spec.streams:
        from ckdist.models.blocks.hyper_connections import run_streams

        return rows(run_streams(g, ids, x, spec, spec.streams))
    if spec.block_residuals:
        from ckdist.models.blocks.block_layers import run_blocks

        return rows(run_blocks(g, x, spec, spec.block_residuals))
    for i in range(len(spec.layers)):
        x = g.boundary(block(g, x, spec, i, rows if i == len(spec.layers) - 1 else all_rows, kept, inputs), *inputs)
    return x


def head(g: Tracer, spec: ModelSpec) -> Weight:
    """The output projection, or the embeddings if they are tied."""
    return table(g, spec, EMBEDDING if spec.tie_embeddings else OUTPUT)


def final_norm(g: Tracer, x: Value, spec: ModelSpec) -> Value:
    """The norm after the last layer. x: (rows, hidden).

    In a post-norm model it has the name of the next layer's first norm. Normed streams need none.
    """
    if spec.streams is not None and spec.streams.normed:
        return x
    post_norm = spec.layers[-1].norms.replaces_stream[1]
    path = f"{spec.root}.layers.{len(spec.layers)}.input_layernorm" if post_norm else f"{spec.root}.norm"
    return RowNorm(spec.norm, spec.norm_eps)(g, x, path)


def forward(g: Tracer, ids: Value, spec: ModelSpec) -> Value:
    """(tokens,) ids -> (outputs, vocab) logits of the tokens that the batch selects."""
    return logits(g, final_norm(g, g.gather(hidden(g, ids, spec, g.select_rows)), spec), spec)


def logits(g: Tracer, x: Value, spec: ModelSpec) -> Value:
    """(outputs, hidden) after the last norm -> (outputs, vocab)."""
    out, x = head(g, spec), g.scale(x, spec.logit_scale)
    bias = (g.weight(OUTPUT_BIAS, out.dims[0]),) if spec.output_bias else ()
    return g.gather(g.soft_cap(g.linear(x, out, bias=bias, names=["logits"]), spec.logit_soft_cap))


def hidden_rows(g: Tracer, ids: Value, spec: ModelSpec) -> Value:
    """(tokens,) ids -> (outputs, hidden) after the last norm, for the tokens that the batch selects.

    (outputs, 1) for a cross-encoder.
    """
    x = final_norm(g, g.gather(hidden(g, ids, spec, g.select_rows)), spec)
    if spec.scorer is not None:
        from ckdist.models.blocks.scorer import scores

        x = scores(g, x, spec.scorer, spec.norm_eps)
    for i, width in enumerate(spec.projections):  # they commute with the mean of a sequence's rows
        x = g.linear(x, g.weight(projection(i), Dim("projection", width), x.dims[-1]))
    return g.output_rows(x)


def hidden_forward(spec: ModelSpec) -> Callable[[Tracer, Value, ModelSpec], Value]:
    """The forward that makes hidden states: those of the encoder, if the model has one."""
    if spec.encoder is None:
        return hidden_rows
    from ckdist.models.encoder import encode

    return encode


def main_forward(spec: ModelSpec) -> Callable[[Tracer, Value, ModelSpec], Value]:
    """The forward that reads all weights, except those of `spec.encoder`. For an encoder it is `hidden_rows`."""
    if spec.predicts:
        from ckdist.models.predictor import predict

        return predict
    return forward if spec.generates else hidden_rows


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape, (out, in) or (n,), of all weights that the forward reads. Tied embeddings have one entry."""
    forwards = [main_forward(spec), *([] if spec.encoder is None else [hidden_forward(spec)])]
    weights = [w for one in forwards for w in trace(one, spec, SINGLE, Mesh()).weights]
    return {w.name: tuple(d.elements for d in w.dims) for w in weights}
