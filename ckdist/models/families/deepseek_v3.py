"""DeepSeek-V3, V3.1 and R1: V2 with another router. Their GGUF architecture is deepseek2."""

from dataclasses import replace

from ckdist.models.families import deepseek_v2

KEYS = deepseek_v2.KEYS.but(
    defaults={
        "first_k_dense_replace": 3, "max_position_embeddings": 4096, "n_group": 8, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "topk_group": 4, "topk_method": "noaux_tc",
    },
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
)  # fmt: skip
FAMILY = replace(deepseek_v2.FAMILY, keys=KEYS, gguf=deepseek_v2.GGUF, from_config=deepseek_v2.model, from_gguf=None)
