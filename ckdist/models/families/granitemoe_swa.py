"""Granite with windows and experts."""

from dataclasses import replace

from ckdist.models import limits
from ckdist.models.families import family, granite_swa, granitemoe
from ckdist.models.families.family import Fields, GgufForm, GgufHeader, in_layers
from ckdist.models.spec import ModelSpec, MoeFfn

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


def experts(header: GgufHeader) -> MoeFfn:
    """Reads the experts from GGUF metadata. Gates and ups lie in one tensor."""
    from ckdist.models import from_gguf

    shared = header.fields.integer("expert_shared_feed_forward_length", 0, low=0, high=limits.MAX_FFN)
    moe = from_gguf.experts(header, granitemoe.ROUTING)
    return replace(moe, intermediate_size=from_gguf.ffn_size(header), shared_size=shared)


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    from ckdist.models import to_gguf

    return granite_swa.export(spec, where, to_gguf.experts(spec, where, ["expert_shared_feed_forward_length"]))


SHARED = tuple(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up"))
FAMILY = replace(
    granitemoe.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=None,
    gguf=granite_swa.NAME,
    to_gguf=export,
    safetensors=granitemoe.FAMILY.safetensors.but(
        in_layers("model.layers", {
            "block_sparse_moe.router": "mlp.gate",
            "block_sparse_moe.experts.gate_up_proj": (family.GATE, family.UP),
            "block_sparse_moe.experts.down_proj": family.DOWN,
        }),
        family.STACKED_EXPERTS,
    ),
    gguf_names=granite_swa.FAMILY.gguf_names.but(
        {**family.EXPERTS, **in_layers("blk", {"ffn_gate_shexp": (), "ffn_up_shexp": SHARED})}
    ),
    gguf_values=None,
)  # fmt: skip
