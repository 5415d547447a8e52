"""ERNIE 4.5 without experts: Llama whose rotated pairs are neighbours."""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.config_keys import sizes
from ckdist.models.families import llama, qwen2
from ckdist.models.families.family import Fields, GgufReader
from ckdist.models.spec import LayerSpec, ModelSpec

KEYS = llama.KEYS.but(
    defaults={
        **sizes(layers=18, heads=16, kv_heads=2, head=128, positions=131072),
        "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True,
    },
    nulls={"head_dim": None, "num_key_value_heads": None},
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    n, bias = from_config.sizes(f), f.flag("use_bias")
    attention, ropes = n.attention(qkv_bias=bias, o_bias=bias), from_config.rotations(f, n, interleaved=True)
    layer = LayerSpec(attention, from_config.dense(f, bias=bias))
    return from_config.model(f, outer, n, [layer] * n.num_layers, ropes)


FAMILY = replace(qwen2.FAMILY, keys=KEYS, from_config=config, from_gguf=GgufReader(rotation={"interleaved": True}))
