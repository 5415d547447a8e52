"""Llama 2 and 3. GGUF files of Mistral and Mixtral have the architecture llama too."""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families import family
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec
from ckdist.program.routing import Routing

NAME = "llama"
KEYS = ConfigKeys({"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4})


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    n, bias = from_config.sizes(f), f.flag("attention_bias")
    attention = n.attention(qkv_bias=bias, o_bias=bias)
    ffn = from_config.dense(f, bias=f.flag("mlp_bias"))
    layers = [LayerSpec(attention, ffn)] * n.num_layers
    return n.model(NAME, layers, from_config.rotations(f, n), from_config.tied(f, outer))


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    from ckdist.models import from_gguf

    f, n = header.fields, from_gguf.sizes(header)
    window = f.integer("attention.sliding_window", 0, low=0)
    if from_gguf.is_mixture(header):
        name, ffn = "mixtral", from_gguf.experts(header, Routing(used=2))
    else:
        name, ffn = NAME, from_gguf.dense(header)
    attention = from_gguf.attention(header, n)
    sliding = from_gguf.sliding_layers(f, n.num_layers, 0)
    layers = [LayerSpec(replace(attention, window=window * slides), ffn) for slides in sliding]
    return n.model(name, layers, {"global": from_gguf.rotation(header, n)}, from_gguf.tied(header))


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(rotated=True, factors=True),
    gguf_names=family.GGUF.but({}, family.INTERLEAVED),
)
