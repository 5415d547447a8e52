"""Gemma 3: Gemma 2 with norms of queries and keys, a window with its own rotation in most layers, fewer soft caps."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ckdist.models import from_config, rope
from ckdist.models.config_keys import sizes
from ckdist.models.families import gemma2
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufWriter
from ckdist.models.from_config import Sizes
from ckdist.models.spec import LayerSpec, ModelSpec, RopeSpec

NAME = "gemma3"
THETA, LOCAL_THETA = 1e6, 1e4
KEYS = gemma2.KEYS.but(
    defaults={  # all: a part of a file may leave out what equals a default
        **sizes(hidden=2304, ffn=9216, positions=131072, vocab=262208),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_local_base_freq": LOCAL_THETA,
        "rope_theta": THETA,
        "sliding_window_pattern": 6,
    },
    aliases={"_sliding_window_pattern": "sliding_window_pattern"},
)


def rotations(f: Fields, n: Sizes) -> dict[str, RopeSpec]:
    """The rotations of full and of sliding layers."""
    shape = rope.RopeShape(n.head_dim, n.max_position, f.number("rope_local_base_freq", low=1.0))
    local = rope.from_fields(f.sub("rope_parameters").sub("sliding_attention"), shape, f)
    return {**from_config.rotations(f, n), "local": local}


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    n = from_config.sizes(f)
    cap = gemma2.soft_cap(f, "attn_logit_softcapping")
    full = replace(gemma2.attention(f, n), soft_cap=cap, qk_norm="head")
    window = from_config.window(f)
    slide = replace(full, window=window, rope="local" if window else "global")
    sliding = from_config.sliding_layers(f, n.num_layers, f.integer("sliding_window_pattern"))
    ffn = gemma2.dense(f)
    return n.model(
        NAME,
        [LayerSpec(slide if slides else full, ffn, gemma2.NORMS) for slides in sliding],
        rotations(f, n),
        from_config.tied(f, outer),
        embedding_scale=math.sqrt(n.hidden_size),
        logit_soft_cap=gemma2.soft_cap(f, "final_logit_softcapping"),
    )


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    from ckdist.models import from_gguf

    f, n = header.fields, from_gguf.sizes(header)
    cap = f.number("attn_logit_softcapping", 0.0, high=1e6)
    full = replace(gemma2.gguf_attention(header, n, 62), soft_cap=cap)
    window = f.integer("attention.sliding_window", low=0)
    slide = replace(full, window=window, rope="local" if window else "global")
    ffn = from_gguf.dense(header, "gelu_tanh")
    theta = f.number("rope.freq_base_swa", LOCAL_THETA, low=1.0)
    local = RopeSpec(rope.plain(n.head_dim, theta).astype(np.float32), theta=theta)
    sliding = from_gguf.sliding_layers(f, n.num_layers, 6)
    return n.model(
        header.family,
        [LayerSpec(slide if slides else full, ffn, gemma2.NORMS) for slides in sliding],
        {"global": from_gguf.rotation(header, n, THETA), "local": local},
        from_gguf.tied(header),
        embedding_scale=math.sqrt(n.hidden_size),
        logit_soft_cap=f.number("final_logit_softcapping", 0.0, high=1e6),
    )


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    """Further GGUF metadata."""
    more: dict[str, Any] = dict(gemma2.caps(spec, where))
    sliding = [layer.attention.window > 0 for layer in spec.layers]
    if any(sliding):
        more["attention.sliding_window_pattern"] = sliding
        more["rope.freq_base_swa"] = float(spec.ropes["local"].theta)
    return more


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(written),
    safetensors=gemma2.FAMILY.safetensors,
    gguf_names=gemma2.FAMILY.gguf_names,
)
