"""Mistral Small 4 and Large 3: DeepSeek-V3 with softmax in the router, and queries scaled by their position.

YaRN changes the rotation alone: params.json of both models has `apply_scale` false. transformers since July 2026, and
llama.cpp, also multiply scores by the square of YaRN's magnitude, as DeepSeek does. We do not: with that factor, vLLM
and SGLang measured lower accuracy of the published weights (vllm-project/vllm#57563, sgl-project/sglang#26203).
"""

from dataclasses import replace

from ckdist.models.families import deepseek_v2, deepseek_v3, family
from ckdist.models.families.family import Fields, GgufForm, GgufHeader
from ckdist.models.spec import LatentAttention, ModelSpec
from ckdist.models.stored_query_scale import config_query_scale
from ckdist.program.routing import Routing

KEYS = deepseek_v3.KEYS.but(
    defaults={
        "first_k_dense_replace": 0, "kv_lora_rank": 256, "max_position_embeddings": 1048576, "n_group": 1,
        "num_experts_per_tok": 4, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "routed_scaling_factor": 1.0,
        "scoring_func": "softmax", "topk_group": 1, "topk_method": "group_limited_greedy",
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    unused=("max_position_embeddings", "partial_rotary_factor"),  # of the rotation, whose width is qk_rope_head_dim
)  # fmt: skip
BETA = 0.1  # of all published models; their GGUF files of architecture mistral4 do not have it


def config(f: Fields, outer: Fields) -> ModelSpec:
    spec, query_scale = deepseek_v2.model(f, outer), config_query_scale(f)
    eps = 0.0 if spec.norm_eps == deepseek_v2.NORM_EPS else deepseek_v2.NORM_EPS
    mixers = [
        replace(mixer, scale=mixer.head_dim**-0.5, norm_eps=eps, query_scale=query_scale)
        for mixer in spec.mixers(LatentAttention)
    ]
    return spec.with_layers(mixer=mixers)


def gguf(header: GgufHeader) -> ModelSpec:
    return deepseek_v2.gguf_model(header, Routing(used=4), BETA)


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    scale, more = spec.mixers(LatentAttention)[0].query_scale, {"attention.temperature_scale": 0.0}
    if scale is not None:
        more = {"attention.temperature_scale": scale.beta, "attention.temperature_length": scale.context}
    return deepseek_v2.form("mistral4", spec, where, more)


FAMILY = replace(
    deepseek_v3.FAMILY,
    keys=KEYS,
    gguf="mistral4",
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    safetensors=deepseek_v3.FAMILY.safetensors.but({}, family.STACKED_EXPERTS),
)
