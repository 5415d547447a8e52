"""Phi-3, Phi-3.5 and Phi-4-mini: Llama with a partial rotation of heads, and longrope.

One tensor has queries, keys and values, another one gate and up. Phi-3.5 MoE and the vision models are not included.
"""

from typing import Any

from ckdist.models import from_config, limits
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families import family
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec

KEYS = ConfigKeys(
    {
        "hidden_act": "silu", "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    },
    only={"full_attn_mod": 1, "interpolate_factor": 1},
    unused=("original_max_position_embeddings",),  # if the rotation is not scaled
)  # fmt: skip
QKV, GATE_UP = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    layer = LayerSpec(n.attention(window=from_config.window(f)), from_config.dense(f))
    return from_config.model(f, outer, n, [layer] * n.num_layers, from_config.rotations(f, n, from_config.part(f)))


def gguf(header: GgufHeader) -> ModelSpec:
    n = header.sizes()
    window = header.fields.integer("attention.sliding_window", 0, low=0, high=limits.MAX_POSITION)
    ropes = {"global": header.rotation(n, partial=True, longrope=True)}
    return header.model(n, [LayerSpec(n.attention(window=window), header.dense())] * n.num_layers, ropes)


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
