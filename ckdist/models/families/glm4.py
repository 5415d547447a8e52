"""GLM-4 of 2025 (GLM-4-0414, GLM-Z1): norms before and after each part; gate and up in one tensor.

Half of each head is rotated, in interleaved pairs.
"""

from ckdist.models import from_config
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families import family
from ckdist.models.families.family import Family, GgufForm, GgufHeader, in_layers
from ckdist.models.fields import Fields
from ckdist.models.from_config import Sizes
from ckdist.models.spec import Attention, DenseFfn, LayerSpec, ModelSpec, Norms, RopeSpec

NAME = "glm4"
NORMS = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
KEYS = ConfigKeys(
    {
        "attention_bias": True,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
        "rope_theta": 1e4,
    }
)
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
GGUF_NAMES = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": GATE_UP,
}


def model(n: Sizes, attention: Attention, rope: RopeSpec, ffn: DenseFfn, tied: bool) -> ModelSpec:
    """Makes a model with identical layers."""
    layers = [LayerSpec(attention, ffn, NORMS)] * n.num_layers
    return n.model(NAME, layers, {"global": rope}, tied)


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    n = from_config.sizes(f)
    bias = f.flag("attention_bias")
    attention = n.attention(qkv_bias=bias)
    rope = from_config.rotations(f, n, from_config.part(f), interleaved=True)["global"]
    return model(n, attention, rope, from_config.dense(f), from_config.tied(f, outer))


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    from ckdist.models import from_gguf

    n = from_gguf.sizes(header)
    rope = from_gguf.rotation(header, n, partial=True, interleaved=True)
    return model(n, from_gguf.attention(header, n), rope, from_gguf.dense(header), from_gguf.tied(header))


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    from ckdist.models import to_gguf

    return to_gguf.dense(NAME, spec, where, {"rope.dimension_count": spec.ropes["global"].dims})


FAMILY = Family(
    name=NAME,
    architectures=("Glm4ForCausalLM",),
    model_types=("glm4",),
    keys=KEYS,
    gguf=NAME,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    safetensors=family.SAFETENSORS.but(in_layers("model.layers", {"mlp.gate_up_proj": GATE_UP})),
    gguf_names=family.GGUF.but(in_layers("blk", GGUF_NAMES)),
)
