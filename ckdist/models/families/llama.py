"""Llama 2 and 3. GGUF files of Mistral and Mixtral have the architecture llama too."""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families import family
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec
from ckdist.program.routing import Routing

KEYS = ConfigKeys({"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4})


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    layer = LayerSpec(from_config.attention(f, n), from_config.dense(f, bias=f.flag("mlp_bias")))
    return from_config.model(f, outer, n, [layer] * n.num_layers)


def gguf(header: GgufHeader) -> ModelSpec:
    f, n = header.fields, header.sizes()
    window = f.integer("attention.sliding_window", 0, low=0)
    if header.is_mixture():
        name, ffn = "mixtral", header.experts(Routing(used=2))
    else:
        name, ffn = "llama", header.dense()
    attention, sliding = header.attention(n), header.sliding_layers(n.num_layers, 0)
    layers = [LayerSpec(replace(attention, window=window * slides), ffn) for slides in sliding]
    return header.model(n, layers, family=name)


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(rotated=True, factors=True),
    gguf_names=family.GGUF.but({}, family.INTERLEAVED),
)
