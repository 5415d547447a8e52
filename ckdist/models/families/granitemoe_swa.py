"""Granite with windows and experts."""

from dataclasses import replace

from ckdist.models import limits
from ckdist.models.config_keys import sizes
from ckdist.models.families import family, granite_swa, granitemoe
from ckdist.models.families.family import Fields, GgufForm, GgufHeader
from ckdist.models.spec import ModelSpec, MoeFfn

KEYS = granitemoe.KEYS.but(
    defaults={
        **sizes(hidden=4096, ffn=11008, layers=32, heads=32, positions=2048, vocab=32000),
        "rms_norm_eps": 1e-6, "sliding_window": 128,
    },
    nulls={"num_key_value_heads": None, "sliding_window": None},
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    return granite_swa.windowed(granitemoe.config(f, outer), f)


def experts(header: GgufHeader) -> MoeFfn:
    """Reads the experts from GGUF metadata. Gates and ups lie in one tensor."""
    shared = header.fields.integer("expert_shared_feed_forward_length", 0, low=0, high=limits.MAX_FFN)
    moe = header.experts(granitemoe.ROUTING)
    return replace(moe, intermediate_size=header.ffn_size(), shared_size=shared)


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    from ckdist.models import to_gguf

    return granite_swa.export(spec, where, to_gguf.experts(spec, where, granitemoe.SHARED))


SHARED = tuple(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up"))
FAMILY = replace(
    granitemoe.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=None,
    gguf="granite_swa",
    to_gguf=export,
    safetensors=granitemoe.FAMILY.safetensors.but_in_layers(
        {"block_sparse_moe.router": "mlp.gate", **family.stacked("block_sparse_moe.experts")}, family.STACKED_EXPERTS
    ),
    gguf_names=granite_swa.FAMILY.gguf_names.but(family.EXPERTS).but_in_layers(
        {"ffn_gate_shexp": (), "ffn_up_shexp": SHARED}
    ),
    gguf_values=None,
)  # fmt: skip
