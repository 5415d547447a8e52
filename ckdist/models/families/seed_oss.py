"""Seed-OSS: Llama with biases on queries, keys and values."""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.config_keys import sizes
from ckdist.models.families import family, llama, qwen2
from ckdist.models.fields import Fields
from ckdist.models.spec import LayerSpec, ModelSpec

KEYS = llama.KEYS.but(
    defaults={**sizes(layers=64, heads=80, kv_heads=8, head=128, positions=524288), "attention_bias": True},
    nulls={"head_dim": None, "num_key_value_heads": None},
    unused=("residual_dropout",),
)


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    attention = n.attention(qkv_bias=f.flag("attention_bias"), o_bias=f.flag("attention_out_bias"))
    layer = LayerSpec(attention, from_config.dense(f, bias=f.flag("mlp_bias")))
    return from_config.model(f, outer, n, [layer] * n.num_layers)


FAMILY = replace(qwen2.FAMILY, keys=KEYS, from_config=config, gguf_names=family.GGUF.but(family.POST_ATTENTION_NORM))
