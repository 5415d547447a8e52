"""Granite 3, dense: Llama with multipliers on embeddings, scores, residuals and logits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckdist.errors import ArchitectureError
from ckdist.models import from_config
from ckdist.models.families import llama
from ckdist.models.families.family import Fields, GgufForm, GgufHeader
from ckdist.models.spec import Attention, DenseFfn, LayerSpec, ModelSpec, MoeFfn
from ckdist.models.state_mixers import Mamba2

NAME = "granite"
KEYS = llama.KEYS.but(
    defaults=dict.fromkeys(
        ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0
    )
)


def model(
    name: str,
    f: Fields,
    outer: Fields,
    ffn: DenseFfn | MoeFfn,
    rotates: bool = True,
    mixers: Sequence[Mamba2 | None] = (),
    **more: Any,
) -> ModelSpec:
    """Reads a config.json. `mixers`: of each layer, in place of attention. `more` are further fields of ModelSpec."""
    n, bias = from_config.sizes(f), f.flag("attention_bias")
    multiplier = lambda name: f.number(name, high=1e6)
    rope = "global" if rotates else None
    attention = n.attention(scale=multiplier("attention_multiplier"), qkv_bias=bias, o_bias=bias, rope=rope)
    scale = multiplier("residual_multiplier")
    layers = [LayerSpec(mixer or attention, ffn, residual_scale=scale) for mixer in mixers or [None] * n.num_layers]
    return n.model(
        name,
        layers,
        from_config.rotations(f, n),
        from_config.tied(f, outer),
        embedding_scale=multiplier("embedding_multiplier"),
        logit_scale=1 / multiplier("logits_scaling"),
        **more,
    )


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    return model(NAME, f, outer, from_config.dense(f, bias=f.flag("mlp_bias")))


def gguf_model(
    name: str, header: GgufHeader, ffn: DenseFfn | MoeFfn, mixers: Sequence[Mamba2 | None] = ()
) -> ModelSpec:
    """Reads GGUF metadata. `mixers`: of each layer, in place of attention.

    Models without rotation have false in rope.scaling.finetuned.
    """
    from ckdist.models import from_gguf

    f, n = header.fields, from_gguf.sizes(header)
    multiplier = lambda name: f.number(name, 1.0, high=1e6)
    rope = "global" if f.flag("rope.scaling.finetuned", True) else None
    attention, scale = replace(from_gguf.attention(header, n), rope=rope), multiplier("residual_scale")
    return n.model(
        name,
        [LayerSpec(mixer or attention, ffn, residual_scale=scale) for mixer in mixers or [None] * n.num_layers],
        {"global": from_gguf.rotation(header, n)},
        from_gguf.tied(header),
        embedding_scale=multiplier("embedding_scale"),
        logit_scale=1 / multiplier("logit_scale"),
    )


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    from ckdist.models import from_gguf

    return gguf_model(NAME, header, from_gguf.dense(header))


def form(architecture: str, spec: ModelSpec, where: str, more: Mapping[str, Any]) -> GgufForm:
    """Returns the GGUF metadata of a model. `more` are further values."""
    from ckdist.models import to_gguf

    attention = next((layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention)), None)
    if attention is None:
        raise ArchitectureError(f"{where}: {spec.family} without attention has no GGUF form")
    own = {
        "rope.dimension_count": spec.ropes["global"].dims,
        "attention.scale": float(attention.scale),
        "residual_scale": float(spec.layers[0].residual_scale),
        "embedding_scale": float(spec.embedding_scale),
        "logit_scale": 1 / float(spec.logit_scale),
        **({} if attention.rope else {"rope.scaling.finetuned": False}),
    }
    return to_gguf.dense(architecture, spec, where, {**own, **more}, factors=True)


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    return form(NAME, spec, where, {})


FAMILY = replace(llama.FAMILY, keys=KEYS, from_config=config, from_gguf=gguf, to_gguf=export)
