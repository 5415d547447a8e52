"""Other names of families, with defaults and names of fields of their own: name -> changes of ConfigKeys."""

from dataclasses import replace
from typing import Any

from ckdist.models.families.family import Family

CHANGES: dict[str, dict[str, Any]] = {
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
    "youtu": {"defaults": {
        "first_k_dense_replace": 1 << 12, "hidden_size": 2048, "intermediate_size": 6144,
        "max_position_embeddings": 131072, "num_attention_heads": 16,
        "num_hidden_layers": 32, "tie_word_embeddings": True, "vocab_size": 128256,
    }, "unused": ("embedding_initializer_range",)},
}  # fmt: skip


def variant(name: str, base: Family) -> Family:
    """The family `name`, whose models are those of `base`."""
    return replace(base, keys=base.keys.but(**CHANGES[name]), from_gguf=None)
