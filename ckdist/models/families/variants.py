"""Other names of families, with defaults and names of fields of their own: name -> changes of ConfigKeys."""

from dataclasses import replace
from typing import Any

from ckdist.models.config_keys import sizes
from ckdist.models.families.family import Family

IMAGES = ("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id")
CHANGES: dict[str, dict[str, Any]] = {
    "glm4v": {
        "defaults": {
            **sizes(hidden=4096, ffn=13696, layers=40, heads=32, positions=32768, vocab=151552), "rms_norm_eps": 1e-5,
        },
        "nulls": {"num_key_value_heads": None}, "unused": IMAGES,
    },
    "glm4v_moe": {
        "defaults": {
            **sizes(hidden=4096, ffn=10944, layers=46, heads=96, positions=65536, vocab=151424),
            "moe_intermediate_size": 1408, "n_routed_experts": 128,
        },
        "unused": IMAGES,
    },
    "internlm3": {
        "defaults": {**sizes(kv_heads=2, head=128, positions=32768), "rms_norm_eps": 1e-5},
        "aliases": {"bias": "mlp_bias", "qkv_bias": "attention_bias"},
        "nulls": {"num_key_value_heads": None},
    },
    "iquestcoder": {
        "defaults": {**sizes(kv_heads=8, head=128, positions=131072), "rms_norm_eps": 1e-5},
        "nulls": {"num_key_value_heads": None},
    },
    "kimi_k2": {},  # its sizes are in its files
    "sarvam_mla": {
        "defaults": {
            **sizes(hidden=4096, ffn=16384, layers=32, heads=64, vocab=262144), "first_k_dense_replace": 1,
            "n_group": 1, "n_routed_experts": 128, "q_lora_rank": None, "topk_group": 1,
        },
        "aliases": {"num_shared_experts": "n_shared_experts"},
        "nulls": {"num_key_value_heads": None}, "only": {"score_function": "sigmoid"},
        "unused": ("moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size", "q_head_dim"),
    },
    "sarvam_moe": {
        "defaults": {
            **sizes(hidden=4096, ffn=8192, layers=19, heads=64, head=64, positions=131072, vocab=262144),
            "moe_intermediate_size": 1024, "n_group": 1, "num_experts": 128, "num_experts_per_tok": 6,
            "rope_theta": 8e6, "routed_scaling_factor": 2.5, "topk_group": 1,
        },
        "aliases": {
            "attention_bias": "use_qkv_bias", "n_routed_experts": "num_experts", "num_local_experts": "num_experts",
            "n_shared_experts": "num_shared_experts", "num_mtp_layers": "num_nextn_predict_layers",
        },
    },
    "youtu": {
        "defaults": {
            **sizes(hidden=2048, ffn=6144, layers=32, heads=16, positions=131072, vocab=128256),
            "first_k_dense_replace": 1 << 12, "tie_word_embeddings": True,
        },
        "unused": ("embedding_initializer_range",),
    },
}  # fmt: skip


def variant(name: str, base: Family) -> Family:
    """The family `name`, whose models are those of `base`."""
    return replace(base, keys=base.keys.but(**CHANGES[name]), from_gguf=None)
