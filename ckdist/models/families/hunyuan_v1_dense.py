"""Hunyuan without experts: queries and keys are normed after their rotation."""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.families import family, hunyuan_v1_moe
from ckdist.models.families.family import Fields, GgufReader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec

NAME, GGUF = "hunyuan_v1_dense", "hunyuan-dense"
KEYS = hunyuan_v1_moe.KEYS.but(only={"moe_topk": 1, "num_experts": 1, "use_rotary_pos_emb": True})


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    n, bias = from_config.sizes(f), f.flag("attention_bias")
    attention = n.attention(qkv_bias=bias, o_bias=bias, qk_norm="head", norms_rotated=True)
    layers = [LayerSpec(attention, from_config.dense(f))] * n.num_layers
    return n.model(NAME, layers, from_config.rotations(f, n), from_config.tied(f, outer))


FAMILY = replace(
    hunyuan_v1_moe.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=GgufReader(attention={"norms_rotated": True}),
    to_gguf=GgufWriter(),
    safetensors=family.SAFETENSORS.but_in_layers(
        {"self_attn.query_layernorm": "self_attn.q_norm", "self_attn.key_layernorm": "self_attn.k_norm"}
    ),
    gguf_names=family.GGUF,
)
