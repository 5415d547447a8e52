"""OLMo 2: norms after each part in place of before it, and norms over all heads of queries and keys."""

import math
from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families import family
from ckdist.models.families.family import Family, Fields, GgufHeader, Target
from ckdist.models.spec import LayerSpec, ModelSpec, Norms

NORMS = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
KEYS = ConfigKeys({"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4})
GGUF_NORMS: dict[str, Target] = {
    "attn_norm": (),
    "ffn_norm": (),
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    layer = LayerSpec(from_config.attention(f, n, qk_norm="row"), from_config.dense(f), NORMS)
    return from_config.model(f, outer, n, [layer] * n.num_layers)


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata. OLMo 3 has the same architecture name: it has a window, with an unscaled rotation."""
    from ckdist.models import rope_scaling

    f, n = header.fields, header.sizes()
    window, sliding = header.windows(n.num_layers, 4)
    rotation = header.rotation(n)
    # Older converters wrote OLMo 3's `attention_factor`, the whole magnitude of YaRN, as a further factor.
    written = f.number("rope.scaling.attn_factor", 1.0, high=1e3)
    if math.isclose(written, rope_scaling.yarn_magnitude(f.number("rope.scaling.factor", 1.0)), rel_tol=1e-4):
        rotation = replace(rotation, magnitude=written)
    ropes = {"global": rotation, **({"local": header.local_rotation(n.head_dim)} if window else {})}
    full, ffn = replace(header.attention(n), qk_norm="row"), header.dense()
    slide = replace(full, window=window, rope="local" if window else "global")
    layers = [LayerSpec(slide if slides else full, ffn, NORMS) for slides in sliding]
    return header.model(n, layers, ropes, family="olmo3" if window else "")


FAMILY = Family(keys=KEYS, from_config=config, from_gguf=gguf, gguf_names=family.GGUF.but_in_layers(GGUF_NORMS))
