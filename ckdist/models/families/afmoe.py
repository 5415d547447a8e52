"""Trinity (AFMoE): gates of elements after attention, norms around each part, GLM-4.5's experts.

Sliding layers rotate, full layers do not.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ckdist.errors import ArchitectureError
from ckdist.models import from_config, limits
from ckdist.models.config_keys import sizes
from ckdist.models.families import exaone4, family, gemma2, glm4moe
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufWriter
from ckdist.models.spec import Attention, Ffn, LayerSpec, ModelSpec

PERIOD = 4
KEYS = glm4moe.KEYS.but(
    defaults={
        **sizes(hidden=2048, ffn=6144, layers=32, heads=16, kv_heads=None, head=128, positions=16384, vocab=200192),
        "global_attn_every_n_layers": PERIOD, "moe_intermediate_size": 1408, "n_shared_experts": 2, "num_experts": 64,
        "num_experts_per_tok": 6, "partial_rotary_factor": None, "sliding_window": 1024,
    },
    aliases={
        "num_dense_layers": "first_k_dense_replace",
        "num_local_experts": "num_experts",
        "num_shared_experts": "n_shared_experts",
        "route_norm": "norm_topk_prob",
        "route_scale": "routed_scaling_factor",
    },
    nulls={"num_key_value_heads": None, "sliding_window": None},
    only={"num_expert_groups": 1, "num_limited_groups": 1, "score_func": "sigmoid"},
    unused=("load_balance_coeff", "use_grouped_mm"),
)  # fmt: skip


def layers(plain: Attention, window: int, sliding: list[bool], ffns: Sequence[Ffn]) -> list[LayerSpec]:
    """Makes the layers, with gates and norms of heads. Layers without a window do not rotate."""
    gated = replace(plain, qk_norm="head", gated="sigmoid")
    kinds = {True: replace(gated, window=window), False: replace(gated, rope=None)}
    return [LayerSpec(kinds[slides], ffn, gemma2.NORMS) for ffn, slides in zip(ffns, sliding, strict=True)]


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    sliding = from_config.sliding_layers(f, n.num_layers, f.integer("global_attn_every_n_layers"))
    ffns = glm4moe.feed_forwards(f, n.num_layers, "num_experts")
    scale = math.sqrt(n.hidden_size) if f.flag("mup_enabled") else 1.0
    made = layers(n.attention(), from_config.window(f), sliding, ffns)
    return from_config.model(f, outer, n, made, embedding_scale=scale)


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata. Readers always scale embeddings."""
    n, window = header.sizes(), header.fields.integer("attention.sliding_window", 0, low=0, high=limits.MAX_POSITION)
    ffns = header.feed_forwards(n, header.experts(glm4moe.ROUTING, shared=True), 1)
    made = layers(header.attention(n), window, header.sliding_layers(n.num_layers, PERIOD), ffns)
    ropes = {"global": header.rotation(n, partial=True)}
    return header.model(n, made, ropes, embedding_scale=math.sqrt(n.hidden_size))


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    """Further GGUF metadata. Raises ArchitectureError for embeddings that are not scaled."""
    if spec.embedding_scale == 1.0:
        raise ArchitectureError(f"{where}: afmoe with mup_enabled false has no GGUF form: its readers scale embeddings")
    if [mixer.rope is not None for mixer in spec.mixers(Attention)] != from_config.periodic(len(spec.layers), PERIOD):
        raise ArchitectureError(f"{where}: afmoe has no GGUF form unless each {PERIOD}th layer has no window")
    return exaone4.written(spec, where)


GATE = {"attn_gate": "self_attn.gate_proj"}
EXPERTS = {"mlp.router.gate": "mlp.gate", "mlp.expert_bias": "mlp.gate.e_score_correction.bias"}
FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(written, experts=family.GROUPED_EXPERTS, rotated=True),
    safetensors=family.SAFETENSORS_EXPERTS.but_in_layers(
        {
            **family.SHARED_EXPERTS, **EXPERTS,
            "pre_mlp_layernorm": "pre_feedforward_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm",
        }
    ),
    gguf_names=family.GGUF_EXPERTS.but_in_layers({**family.POST_NORMS, **GATE}),
)  # fmt: skip
