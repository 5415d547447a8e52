"""Gemma 2: norms before and after each part, soft caps, a sliding window in every second layer."""

import math
from dataclasses import replace
from typing import Any

from ckdist.models import from_config
from ckdist.models.config_keys import ConfigKeys, sizes
from ckdist.models.families import family
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufWriter
from ckdist.models.from_config import Sizes
from ckdist.models.spec import Attention, DenseFfn, LayerSpec, ModelSpec, Norms

NORMS = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
KEYS = ConfigKeys(
    {
        **sizes(layers=26, heads=8, kv_heads=4, head=256, positions=8192),
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    aliases={"sliding_window_size": "sliding_window"},
    nulls={"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": None},
    unused=("hidden_act",),  # the published models use hidden_activation
)  # fmt: skip


def dense(f: Fields) -> DenseFfn:
    """Reads the feed-forward of a layer."""
    return from_config.dense(f, from_config.activation(f, "hidden_activation"))


def soft_cap(f: Fields, name: str) -> float:
    """Reads a soft cap; 0 if there is none."""
    return f.number(name, 0.0, high=1e6)


def attention(f: Fields, n: Sizes, **more: Any) -> Attention:
    """Reads the attention of a layer without a window from a config.json."""
    cap = soft_cap(f, "attn_logit_softcapping")
    return from_config.attention(f, n, scale=f.number("query_pre_attn_scalar") ** -0.5, soft_cap=cap, **more)


def layers(full: Attention, ffn: DenseFfn, sliding: list[bool], window: int, rope: str = "global") -> list[LayerSpec]:
    """Makes the layers. `rope`: the rotation of those with a window."""
    slide = replace(full, window=window, rope=rope if window else "global")
    return [LayerSpec(slide if slides else full, ffn, NORMS) for slides in sliding]


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    sliding = from_config.sliding_layers(f, n.num_layers, [i % 2 == 0 for i in range(n.num_layers)])
    made = layers(attention(f, n), dense(f), sliding, from_config.window(f))
    more = {"embedding_scale": math.sqrt(n.hidden_size), "logit_soft_cap": soft_cap(f, "final_logit_softcapping")}
    return from_config.model(f, outer, n, made, **more)


def gguf_attention(header: GgufHeader, n: Sizes, layers_of_largest: int) -> Attention:
    """Reads the attention from GGUF metadata, which lacks the scale.

    The 27B models of both generations scale by hidden_size / num_heads, all others by head_dim.
    """
    made = header.attention(n)
    if n.num_layers != layers_of_largest:
        return made
    return replace(made, scale=header.fields.number("attention.scale", (n.hidden_size // n.num_heads) ** -0.5))


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata. Absent values are those of the published models."""
    f, n = header.fields, header.sizes()
    cap = lambda name, absent: f.number(name, absent, high=1e6)
    full = replace(gguf_attention(header, n, 46), soft_cap=cap("attn_logit_softcapping", 50.0))
    window, sliding = f.integer("attention.sliding_window", 4096, low=0), header.sliding_layers(n.num_layers, 2)
    more = {"embedding_scale": math.sqrt(n.hidden_size), "logit_soft_cap": cap("final_logit_softcapping", 30.0)}
    return header.model(n, layers(full, header.dense("gelu_tanh"), sliding, window), **more)


def caps(spec: ModelSpec, where: str = "") -> dict[str, float]:  # noqa: ARG001
    """GGUF metadata for soft caps, window and scale. llama.cpp only knows the scales of the published models."""
    windows = [mixer.window for mixer in spec.mixers(Attention) if mixer.window]
    mixer = spec.layers[0].attention
    values = {
        "attention.scale": 0.0 if mixer.scale == mixer.head_dim**-0.5 else float(mixer.scale),
        "attention.sliding_window": windows[0] if windows else 0,
        "attn_logit_softcapping": float(mixer.soft_cap),
        "final_logit_softcapping": float(spec.logit_soft_cap),
    }
    return {name: value for name, value in values.items() if value}


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(caps),
    safetensors=family.SAFETENSORS.but({}, (r".*norm\.weight", "plus_one")),
    gguf_names=family.GGUF_POST_NORMS,
)
