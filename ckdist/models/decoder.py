"""The dense decoder, once, for every family: Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3.

Families differ in numbers and in which norms exist (`ModelSpec`), not in code. Where work is sharded is the layout's
affair: a `g.reduce` stands where a result may be partial, `g.to_heads` where tokens may be sharded, and both vanish
where they are not needed.
"""

from collections.abc import Callable
from typing import TypeAlias

from ckdist.models.spec import ModelSpec
from ckdist.program.program import Value, Weight
from ckdist.program.tracer import Tracer, TrainingTracer

Rows: TypeAlias = Callable[[Value], Value]  # chooses rows of a value


def every(x: Value) -> Value:
    """All rows."""
    return x


def attention(g: Tracer, x: Value, spec: ModelSpec, layer: int, rows: Rows = every) -> Value:
    """Grouped-query attention with rotary positions. x: (tokens, hidden), normalised.

    `rows` chooses those whose results are wanted.
    """
    w = lambda name, *dims: g.weight(f"model.layers.{layer}.self_attn.{name}", *dims)
    bias = (
        (w("q_proj.bias", "heads"), w("k_proj.bias", "kv_heads"), w("v_proj.bias", "kv_heads")) if spec.qkv_bias else ()
    )
    q, k, v = g.linear(
        x,
        w("q_proj.weight", "heads", "hidden"),
        w("k_proj.weight", "kv_heads", "hidden"),
        w("v_proj.weight", "kv_heads", "hidden"),
        bias=bias,
        names=["q", "k", "v"],
    )
    q, k, v = g.to_heads(q, k, v)
    if spec.qk_norm:
        q = g.rms_norm(q, w("q_norm.weight", "head_dim"), spec.norm_eps)
        k = g.rms_norm(k, w("k_norm.weight", "head_dim"), spec.norm_eps)
    slides = bool(spec.sliding_layers) and spec.sliding_layers[layer]
    table = "local" if slides and spec.rope_local is not None else "global"
    o = g.attend(
        g.rope(q, table),
        g.rope(k, table),
        v,
        layer=layer,
        scale=spec.attention_scale,
        soft_cap=spec.attention_soft_cap,
        window=spec.sliding_window if slides else 0,
    )
    o_bias = (w("o_proj.bias", "hidden"),) if spec.o_bias else ()
    return g.reduce(g.linear(rows(g.to_tokens(o)), w("o_proj.weight", "hidden", "heads"), bias=o_bias, names=["attn"]))


def mlp(g: Tracer, x: Value, spec: ModelSpec, layer: int) -> Value:
    """Gated feed-forward. x: (tokens, hidden), normalised."""
    w = lambda name, *dims: g.weight(f"model.layers.{layer}.mlp.{name}", *dims)
    bias = (w("gate_proj.bias", "ffn"), w("up_proj.bias", "ffn")) if spec.mlp_bias else ()
    gate, up = g.linear(
        x, w("gate_proj.weight", "ffn", "hidden"), w("up_proj.weight", "ffn", "hidden"), bias=bias, names=["gate", "up"]
    )
    down_bias = (w("down_proj.bias", "hidden"),) if spec.mlp_bias else ()
    return g.reduce(
        g.linear(
            g.gated(gate, up, spec.activation), w("down_proj.weight", "hidden", "ffn"), bias=down_bias, names=["mlp"]
        )
    )


def block(g: Tracer, x: Value, spec: ModelSpec, layer: int, rows: Rows = every) -> Value:
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)); Gemma also norms what is added.

    Of the rows that `rows` chooses.
    """
    norm = lambda value, name: g.rms_norm(
        value, g.weight(f"model.layers.{layer}.{name}.weight", "hidden"), spec.norm_eps
    )
    attended = attention(g, norm(x, "input_layernorm"), spec, layer, rows)
    if spec.post_norms:
        x = g.add(rows(x), norm(attended, "post_attention_layernorm"))
        return g.add(x, norm(mlp(g, norm(x, "pre_feedforward_layernorm"), spec, layer), "post_feedforward_layernorm"))
    x = g.add(rows(x), attended)
    return g.add(x, mlp(g, norm(x, "post_attention_layernorm"), spec, layer))


def hidden(g: Tracer, ids: Value, spec: ModelSpec, rows: Rows = every) -> Value:
    """(tokens,) ids -> (tokens, hidden) after the last layer, not yet normalised.

    `rows` chooses those that the last layer makes.
    """
    table = g.weight("model.embed_tokens.weight", "vocab", "hidden")
    x = g.boundary(g.scale(g.reduce(g.embed(ids, table)), spec.embedding_scale))
    for layer in range(spec.num_layers):
        x = g.boundary(block(g, x, spec, layer, rows if layer == spec.num_layers - 1 else every))
    return x


def head(g: Tracer, spec: ModelSpec) -> Weight:
    """The output projection: the embeddings where they are tied."""
    return g.weight("model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight", "vocab", "hidden")


def forward(g: Tracer, ids: Value, spec: ModelSpec) -> Value:
    """(tokens,) ids -> (outputs, vocab) logits of the tokens that the batch asks for."""
    x = g.rms_norm(
        g.gather(hidden(g, ids, spec, g.select_rows)), g.weight("model.norm.weight", "hidden"), spec.norm_eps
    )
    return g.gather(g.soft_cap(g.linear(x, head(g, spec), names=["logits"]), spec.logit_soft_cap))


def loss(g: TrainingTracer, ids: Value, targets: Value, spec: ModelSpec) -> Value:
    """(tokens,) ids and targets, -1 where there is none -> the sum of the tokens' losses, over all ranks."""
    x = g.rms_norm(hidden(g, ids, spec), g.weight("model.norm.weight", "hidden"), spec.norm_eps)
    return g.reduce(g.cross_entropy(x, targets, head(g, spec), spec.logit_soft_cap))
