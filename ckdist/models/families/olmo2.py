"""OLMo 2: norms after each part in place of before it, and norms over all heads of queries and keys."""

import math
from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families import family
from ckdist.models.families.family import Family, Fields, GgufHeader, Target
from ckdist.models.from_config import Sizes
from ckdist.models.spec import Attention, LayerSpec, ModelSpec, Norms

NAME = "olmo2"
NORMS = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
KEYS = ConfigKeys({"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4})
GGUF_NORMS: dict[str, Target] = {
    "attn_norm": (),
    "ffn_norm": (),
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def attention(f: Fields, n: Sizes) -> Attention:
    """Reads the attention of a layer without a window from a config.json."""
    bias = f.flag("attention_bias")
    return n.attention(qkv_bias=bias, o_bias=bias, qk_norm="row")


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    n = from_config.sizes(f)
    ffn = from_config.dense(f)
    layers = [LayerSpec(attention(f, n), ffn, NORMS)] * n.num_layers
    return n.model(NAME, layers, from_config.rotations(f, n), from_config.tied(f, outer))


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata. OLMo 3 has the same architecture name: it has a window, with an unscaled rotation."""
    from ckdist.models import from_gguf, rope_scaling

    n = from_gguf.sizes(header)
    window, sliding = from_gguf.windows(header.fields, n.num_layers, 4)
    full = replace(from_gguf.attention(header, n), qk_norm="row")
    rotation, f = from_gguf.rotation(header, n), header.fields
    # Older converters wrote OLMo 3's `attention_factor`, the whole magnitude of YaRN, as a further factor.
    written = f.number("rope.scaling.attn_factor", 1.0, high=1e3)
    if math.isclose(written, rope_scaling.yarn_magnitude(f.number("rope.scaling.factor", 1.0)), rel_tol=1e-4):
        rotation = replace(rotation, magnitude=written)
    ropes = {"global": rotation}
    if window:
        ropes["local"] = from_gguf.plain_rotation(header, n)
    slide = replace(full, window=window, rope="local" if window else "global")
    ffn = from_gguf.dense(header)
    layers = [LayerSpec(slide if slides else full, ffn, NORMS) for slides in sliding]
    return n.model("olmo3" if window else NAME, layers, ropes, from_gguf.tied(header))


FAMILY = Family(keys=KEYS, from_config=config, from_gguf=gguf, gguf_names=family.GGUF.but_in_layers(GGUF_NORMS))
