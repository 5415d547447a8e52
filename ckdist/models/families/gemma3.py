"""Gemma 3: Gemma 2 with norms of queries and keys, a window with its own rotation in most layers, fewer soft caps."""

import math
from dataclasses import replace
from typing import Any

from ckdist.models import from_config, rope
from ckdist.models.config_keys import sizes
from ckdist.models.families import gemma2
from ckdist.models.families.family import Fields, GgufHeader, GgufWriter
from ckdist.models.from_config import Sizes
from ckdist.models.spec import Attention, ModelSpec, RopeSpec

THETA, LOCAL_THETA = 1e6, 1e4
KEYS = gemma2.KEYS.but(
    defaults={  # all: a part of a file may leave out what equals a default
        **sizes(hidden=2304, ffn=9216, positions=131072, vocab=262208),
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_local_base_freq": LOCAL_THETA,
        "rope_theta": THETA, "sliding_window_pattern": 6,
    },
    aliases={"_sliding_window_pattern": "sliding_window_pattern"},
)  # fmt: skip


def rotations(f: Fields, n: Sizes) -> dict[str, RopeSpec]:
    """The rotations of full and of sliding layers."""
    shape = rope.RopeShape(n.head_dim, n.max_position, f.number("rope_local_base_freq", low=1.0))
    local = rope.from_fields(f.sub("rope_parameters").sub("sliding_attention"), shape, f)
    return {**from_config.rotations(f, n), "local": local}


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    sliding = from_config.sliding_layers(f, n.num_layers, f.integer("sliding_window_pattern"))
    full = gemma2.attention(f, n, qk_norm="head")
    layers = gemma2.layers(full, gemma2.dense(f), sliding, from_config.window(f), "local")
    cap = gemma2.soft_cap(f, "final_logit_softcapping")
    scale = math.sqrt(n.hidden_size)
    return from_config.model(f, outer, n, layers, rotations(f, n), embedding_scale=scale, logit_soft_cap=cap)


def gguf(header: GgufHeader) -> ModelSpec:
    f, n = header.fields, header.sizes()
    cap = lambda name: f.number(name, 0.0, high=1e6)
    full = replace(gemma2.gguf_attention(header, n, 62), soft_cap=cap("attn_logit_softcapping"))
    window, sliding = f.integer("attention.sliding_window", low=0), header.sliding_layers(n.num_layers, 6)
    layers = gemma2.layers(full, header.dense("gelu_tanh"), sliding, window, "local")
    ropes = {"global": header.rotation(n, THETA), "local": header.local_rotation(n.head_dim, LOCAL_THETA)}
    more = {"embedding_scale": math.sqrt(n.hidden_size), "logit_soft_cap": cap("final_logit_softcapping")}
    return header.model(n, layers, ropes, **more)


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    more: dict[str, Any] = dict(gemma2.caps(spec, where))
    sliding = [mixer.window > 0 for mixer in spec.mixers(Attention)]
    if any(sliding):
        more["attention.sliding_window_pattern"] = sliding
        more["rope.freq_base_swa"] = float(spec.ropes["local"].theta)
    return more


FAMILY = replace(gemma2.FAMILY, keys=KEYS, from_config=config, from_gguf=gguf, to_gguf=GgufWriter(written))
