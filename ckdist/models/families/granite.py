"""Granite 3, dense: Llama with multipliers on embeddings, scores, residuals and logits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckdist.errors import ArchitectureError
from ckdist.models import from_config
from ckdist.models.families import llama
from ckdist.models.families.family import Fields, GgufForm, GgufHeader
from ckdist.models.from_config import Sizes
from ckdist.models.spec import Attention, Ffn, LayerSpec, ModelSpec
from ckdist.models.state_mixers import Mamba2

KEYS = llama.KEYS.but(
    defaults={f"{name}_multiplier": 1.0 for name in ("attention", "embedding", "residual")} | {"logits_scaling": 1.0}
)


def model(
    f: Fields, outer: Fields, ffn: Ffn, rotates: bool = True, mixers: Sequence[Mamba2 | None] = (), /, **more: Any
) -> ModelSpec:
    """Reads a config.json. `mixers`: of each layer, in place of attention. `more` are further fields of ModelSpec."""
    n, multiplier = from_config.sizes(f), lambda name: f.number(name, high=1e6)
    rope = "global" if rotates else None
    attention = from_config.attention(f, n, scale=multiplier("attention_multiplier"), rope=rope)
    more |= {"embedding_scale": multiplier("embedding_multiplier"), "logit_scale": 1 / multiplier("logits_scaling")}
    return from_config.model(f, outer, n, layers(n, attention, ffn, mixers, multiplier("residual_multiplier")), **more)


def layers(n: Sizes, attention: Attention, ffn: Ffn, mixers: Sequence[Mamba2 | None], scale: float) -> list[LayerSpec]:
    """Makes the layers. `mixers`: of each layer, in place of attention."""
    return [LayerSpec(mixer or attention, ffn, residual_scale=scale) for mixer in mixers or [None] * n.num_layers]


def config(f: Fields, outer: Fields) -> ModelSpec:
    return model(f, outer, from_config.dense(f, bias=f.flag("mlp_bias")))


def gguf_model(header: GgufHeader, ffn: Ffn, mixers: Sequence[Mamba2 | None] = (), family: str = "") -> ModelSpec:
    """Reads GGUF metadata. `mixers`: of each layer, in place of attention.

    Models without rotation have false in rope.scaling.finetuned.
    """
    f, n = header.fields, header.sizes()
    multiplier = lambda name: f.number(name, 1.0, high=1e6)
    rope = "global" if f.flag("rope.scaling.finetuned", True) else None
    made = layers(n, replace(header.attention(n), rope=rope), ffn, mixers, multiplier("residual_scale"))
    more = {"embedding_scale": multiplier("embedding_scale"), "logit_scale": 1 / multiplier("logit_scale")}
    return header.model(n, made, family=family, **more)


def gguf(header: GgufHeader) -> ModelSpec:
    return gguf_model(header, header.dense())


def form(architecture: str, spec: ModelSpec, where: str, more: Mapping[str, Any]) -> GgufForm:
    """Returns the GGUF metadata of a model. `more` are further values."""
    from ckdist.models import to_gguf

    if not (mixers := spec.mixers(Attention)):
        raise ArchitectureError(f"{where}: {spec.family} without attention has no GGUF form")
    own = {
        "rope.dimension_count": spec.ropes["global"].dims,
        "attention.scale": float(mixers[0].scale),
        "residual_scale": float(spec.layers[0].residual_scale),
        "embedding_scale": float(spec.embedding_scale),
        "logit_scale": 1 / float(spec.logit_scale),
        **({} if mixers[0].rope else {"rope.scaling.finetuned": False}),
    }
    return to_gguf.dense(architecture, spec, where, {**own, **more}, factors=True)


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    return form("granite", spec, where, {})


FAMILY = replace(llama.FAMILY, keys=KEYS, from_config=config, from_gguf=gguf, to_gguf=export)
