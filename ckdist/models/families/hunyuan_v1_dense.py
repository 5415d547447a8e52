"""Hunyuan without experts: queries and keys are normed after their rotation."""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.families import family, hunyuan_v1_moe
from ckdist.models.families.family import Fields, GgufReader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec

KEYS = hunyuan_v1_moe.KEYS.but(only={"moe_topk": 1, "num_experts": 1, "use_rotary_pos_emb": True})


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    layer = LayerSpec(hunyuan_v1_moe.attention(f, n), from_config.dense(f))
    return from_config.model(f, outer, n, [layer] * n.num_layers)


FAMILY = replace(
    hunyuan_v1_moe.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=GgufReader(attention={"norms_rotated": True}),
    to_gguf=GgufWriter(),
    safetensors=family.SAFETENSORS.but_in_layers(hunyuan_v1_moe.NORMS),
    gguf_names=family.GGUF,
)
