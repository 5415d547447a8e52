"""GLM-4.7-Flash: DeepSeek-V3 in other sizes, with all experts in one group. Its GGUF architecture is deepseek2.

Layers that predict further tokens (MTP) are left out.
"""

from dataclasses import replace

from ckdist.models.families import deepseek_v3

KEYS = deepseek_v3.KEYS.but(
    defaults={
        "first_k_dense_replace": 1, "max_position_embeddings": 202752, "n_group": 1, "num_experts_per_tok": 4,
        "q_lora_rank": 768, "qk_nope_head_dim": 192, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8,
        "topk_group": 1, "v_head_dim": 256,
    },
)  # fmt: skip
FAMILY = replace(deepseek_v3.FAMILY, keys=KEYS)
