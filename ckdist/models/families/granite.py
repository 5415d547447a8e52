"""Granite 3, dense: Llama with multipliers on embeddings, scores, residuals and logits."""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.families import llama
from ckdist.models.families.family import GgufForm, GgufHeader
from ckdist.models.fields import Fields
from ckdist.models.spec import LayerSpec, ModelSpec

NAME = "granite"
KEYS = llama.KEYS.but(
    defaults=dict.fromkeys(
        ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0
    )
)


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    n, bias = from_config.sizes(f), f.flag("attention_bias")
    multiplier = lambda name: f.number(name, high=1e6)
    scale = multiplier("attention_multiplier")
    attention = n.attention(scale=scale, qkv_bias=bias, o_bias=bias)
    ffn = from_config.dense(f, bias=f.flag("mlp_bias"))
    layers = [LayerSpec(attention, ffn, residual_scale=multiplier("residual_multiplier"))] * n.num_layers
    return n.model(
        NAME,
        layers,
        from_config.rotations(f, n),
        from_config.tied(f, outer),
        embedding_scale=multiplier("embedding_multiplier"),
        logit_scale=1 / multiplier("logits_scaling"),
    )


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    from ckdist.models import from_gguf

    f, n = header.fields, from_gguf.sizes(header)
    multiplier = lambda name: f.number(name, 1.0, high=1e6)
    ffn = from_gguf.dense(header)
    layer = LayerSpec(from_gguf.attention(header, n), ffn, residual_scale=multiplier("residual_scale"))
    return n.model(
        NAME,
        [layer] * n.num_layers,
        {"global": from_gguf.rotation(header, n)},
        from_gguf.tied(header),
        embedding_scale=multiplier("embedding_scale"),
        logit_scale=1 / multiplier("logit_scale"),
    )


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    from ckdist.models import to_gguf

    more = {
        "rope.dimension_count": spec.ropes["global"].dims,
        "attention.scale": float(spec.layers[0].attention.scale),
        "residual_scale": float(spec.layers[0].residual_scale),
        "embedding_scale": float(spec.embedding_scale),
        "logit_scale": 1 / float(spec.logit_scale),
    }
    return to_gguf.dense(NAME, spec, where, more, factors=True)


FAMILY = replace(
    llama.FAMILY,
    name=NAME,
    architectures=("GraniteForCausalLM",),
    model_types=("granite",),
    keys=KEYS,
    gguf=NAME,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
)
