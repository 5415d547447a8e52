"""GLM-4 of 2025 (GLM-4-0414, GLM-Z1): norms before and after each part; gate and up in one tensor.

Half of each head is rotated, in interleaved pairs.
"""

from ckdist.models import from_config
from ckdist.models.config_keys import ConfigKeys, sizes
from ckdist.models.families import family
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufReader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec, Norms

NORMS = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
KEYS = ConfigKeys(
    {
        **sizes(kv_heads=2, head=128, positions=131072),
        "attention_bias": True, "hidden_act": "silu", "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7,
        "rope_theta": 1e4,
    }
)  # fmt: skip
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
GGUF_NAMES = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": GATE_UP,
}


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    layer = LayerSpec(n.attention(qkv_bias=f.flag("attention_bias")), from_config.dense(f), NORMS)
    ropes = from_config.rotations(f, n, from_config.part(f), interleaved=True)
    return from_config.model(f, outer, n, [layer] * n.num_layers, ropes)


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata. Converters reorder the heads of files whose positions have three axes."""
    interleaved = not header.fields.has("rope.dimension_sections")
    return header.uniform(GgufReader(norms=NORMS, rotation={"partial": True, "interleaved": interleaved}))


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(rotated=True),
    safetensors=family.SAFETENSORS.but_in_layers({"mlp.gate_up_proj": GATE_UP}),
    gguf_names=family.GGUF.but_in_layers(GGUF_NAMES),
)
