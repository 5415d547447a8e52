"""Ministral 3: Mistral whose queries are scaled by their position. Its rotation is scaled by YaRN.

Models that read images too have the text part of Mistral Small 3, Ministral 3 or Mistral Small 4.
"""

from dataclasses import replace
from typing import Any

from ckdist.models import from_config, rope_scaling
from ckdist.models.config_keys import sizes
from ckdist.models.families import llama
from ckdist.models.families.family import Fields, GgufHeader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec, RopeSpec
from ckdist.models.stored_query_scale import config_query_scale, gguf_query_scale

KEYS = llama.KEYS.but(
    defaults={
        **sizes(layers=34, heads=32, kv_heads=8, head=128, positions=262144),
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    nulls={"head_dim": None, "num_key_value_heads": None},
    unused=("max_position_embeddings",),  # among the parameters of the rotation
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    attention = n.attention(window=from_config.window(f), query_scale=config_query_scale(f))
    return from_config.model(f, outer, n, [LayerSpec(attention, from_config.dense(f))] * n.num_layers)


def gguf(header: GgufHeader) -> ModelSpec:
    n = header.sizes()
    attention = replace(header.attention(n), query_scale=gguf_query_scale(header.fields))
    rotation = gguf_magnitude(header.fields, header.rotation(n))
    return header.model(n, [LayerSpec(attention, header.dense())] * n.num_layers, {"global": rotation})


def gguf_magnitude(f: Fields, rotation: RopeSpec) -> RopeSpec:
    """Divides the magnitude of YaRN by that of the multiplier in the file, if there is one."""
    multiplier = f.number("rope.scaling.yarn_log_multiplier", 0.0, low=-1.0, high=1e3)
    by = rope_scaling.yarn_magnitude(f.number("rope.scaling.factor", 1.0), multiplier)
    return replace(rotation, magnitude=rotation.magnitude / by)


def written(spec: ModelSpec, where: str) -> dict[str, Any]:  # noqa: ARG001
    r, scale, more = spec.ropes["global"], spec.layers[0].attention.query_scale, dict[str, Any]()
    if r.scaling.get("rope_type", r.scaling.get("type")) == "yarn":
        more |= {"rope.scaling.yarn_log_multiplier": 1.0, "rope.scaling.attn_factor": r.magnitude}
    if scale is not None:
        more |= {"attention.temperature_scale": scale.beta, "rope.scaling.original_context_length": scale.context}
    return more


FAMILY = replace(
    llama.FAMILY,
    keys=KEYS,
    gguf="mistral3",
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(written, rotated=True, factors=True, windows="sliding_window to null"),
)
