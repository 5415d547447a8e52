"""Granite with windows and experts."""

from dataclasses import replace

from ckdist.models.families import family, granite_swa, granitemoe
from ckdist.models.families.family import GgufWriter, in_layers
from ckdist.models.fields import Fields
from ckdist.models.spec import ModelSpec

NAME = "granitemoe_swa"
KEYS = granitemoe.KEYS.but(
    defaults={
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 2048, "num_attention_heads": 32,
        "num_hidden_layers": 32, "rms_norm_eps": 1e-6, "sliding_window": 128, "vocab_size": 32000,
    },
    nulls={"num_key_value_heads": None, "sliding_window": None},
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    return replace(granite_swa.windowed(granitemoe.config(f, outer), f), family=NAME)


FAMILY = replace(
    granitemoe.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=None,
    to_gguf=GgufWriter(refused="its readers expect gates and ups of experts in one tensor"),
    safetensors=granitemoe.FAMILY.safetensors.but(
        in_layers("model.layers", {
            "block_sparse_moe.router": "mlp.gate",
            "block_sparse_moe.experts.gate_up_proj": (family.GATE, family.UP),
            "block_sparse_moe.experts.down_proj": family.DOWN,
        }),
        family.STACKED_EXPERTS,
    ),
    gguf_names=family.GGUF,
    gguf_values=None,
)  # fmt: skip
