"""Phi-3, Phi-3.5 and Phi-4-mini: Llama with a partial rotation of heads, and longrope.

One tensor has queries, keys and values, another one gate and up. Phi-3.5 MoE and the vision models are not included.
"""

from typing import Any

from ckdist.models import from_config
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families import family
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufWriter
from ckdist.models.from_config import Sizes
from ckdist.models.spec import DenseFfn, LayerSpec, ModelSpec, RopeSpec

NAME = "phi3"
KEYS = ConfigKeys(
    {
        "hidden_act": "silu", "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    },
    only={"full_attn_mod": 1, "interpolate_factor": 1},
    unused=("original_max_position_embeddings",),  # if the rotation is not scaled
)  # fmt: skip
QKV, GATE_UP = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")


def model(n: Sizes, rope: RopeSpec, window: int, ffn: DenseFfn, tied: bool) -> ModelSpec:
    """Makes a model with identical layers."""
    attention = n.attention(window=window)
    layers = [LayerSpec(attention, ffn)] * n.num_layers
    return n.model(NAME, layers, {"global": rope}, tied)


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    n = from_config.sizes(f)
    rope = from_config.rotations(f, n, from_config.part(f))["global"]
    return model(n, rope, from_config.window(f), from_config.dense(f), from_config.tied(f, outer))


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    from ckdist.models import from_gguf

    n = from_gguf.sizes(header)
    rope = from_gguf.rotation(header, n, partial=True, longrope=True)
    window = header.fields.integer("attention.sliding_window", 0, low=0, high=1 << 30)
    return model(n, rope, window, from_gguf.dense(header), from_gguf.tied(header))


def written(spec: ModelSpec, where: str) -> dict[str, Any]:  # noqa: ARG001
    """Further GGUF metadata. llama.cpp reports that it ignores the window of this family."""
    return {"attention.sliding_window": spec.layers[0].attention.window}


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(written, rotated=True),
    safetensors=family.SAFETENSORS.but_in_layers({"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": GATE_UP}),
    gguf_names=family.GGUF.but_in_layers({"attn_qkv": QKV, "ffn_up": GATE_UP}),
)
