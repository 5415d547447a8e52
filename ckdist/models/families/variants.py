"""Other names of families, with defaults and names of fields of their own: name -> changes of ConfigKeys."""

from dataclasses import replace
from typing import Any

from ckdist.models.families.family import Family

IMAGES = ("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id")
CHANGES: dict[str, dict[str, Any]] = {
    "glm4v": {
        "defaults": {
            "hidden_size": 4096, "intermediate_size": 13696, "max_position_embeddings": 32768,
            "num_attention_heads": 32, "num_hidden_layers": 40, "rms_norm_eps": 1e-5, "vocab_size": 151552,
        },
        "nulls": {"num_key_value_heads": None}, "unused": IMAGES,
    },
    "glm4v_moe": {
        "defaults": {
            "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 65536,
            "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_attention_heads": 96,
            "num_hidden_layers": 46, "vocab_size": 151424,
        },
        "unused": IMAGES,
    },
    "internlm3": {
        "defaults": {
            "head_dim": 128, "max_position_embeddings": 32768, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        },
        "aliases": {"bias": "mlp_bias", "qkv_bias": "attention_bias"},
        "nulls": {"num_key_value_heads": None},
    },
    "iquestcoder": {
        "defaults": {
            "head_dim": 128, "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        },
        "nulls": {"num_key_value_heads": None},
    },
    "kimi_k2": {},  # its sizes are in its files
    "sarvam_mla": {
        "defaults": {
            "first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 16384, "n_group": 1,
            "n_routed_experts": 128, "num_attention_heads": 64, "num_hidden_layers": 32, "q_lora_rank": None,
            "topk_group": 1, "vocab_size": 262144,
        },
        "aliases": {"num_shared_experts": "n_shared_experts"},
        "nulls": {"num_key_value_heads": None}, "only": {"score_function": "sigmoid"},
        "unused": ("moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size", "q_head_dim"),
    },
    "sarvam_moe": {
        "defaults": {
            "head_dim": 64, "hidden_size": 4096, "intermediate_size": 8192, "max_position_embeddings": 131072,
            "moe_intermediate_size": 1024, "n_group": 1, "num_experts": 128, "num_experts_per_tok": 6,
            "num_hidden_layers": 19, "num_attention_heads": 64, "rope_theta": 8e6, "routed_scaling_factor": 2.5,
            "topk_group": 1, "vocab_size": 262144,
        },
        "aliases": {
            "attention_bias": "use_qkv_bias", "n_routed_experts": "num_experts", "num_local_experts": "num_experts",
            "n_shared_experts": "num_shared_experts", "num_mtp_layers": "num_nextn_predict_layers",
        },
    },
    "youtu": {"defaults": {
        "first_k_dense_replace": 1 << 12, "hidden_size": 2048, "intermediate_size": 6144,
        "max_position_embeddings": 131072, "num_attention_heads": 16,
        "num_hidden_layers": 32, "tie_word_embeddings": True, "vocab_size": 128256,
    }, "unused": ("embedding_initializer_range",)},
}  # fmt: skip


def variant(name: str, base: Family) -> Family:
    """The family `name`, whose models are those of `base`."""
    return replace(base, keys=base.keys.but(**CHANGES[name]), from_gguf=None)
