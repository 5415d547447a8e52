"""Granite 3 with experts, and a shared expert in some models. Also Granite 4 with experts and without Mamba."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckdist.errors import ArchitectureError
from ckdist.models import from_config, limits, mamba2_fields
from ckdist.models.families import family, granite
from ckdist.models.families.family import Fields, GgufForm, GgufHeader
from ckdist.models.spec import Attention, ModelSpec, MoeFfn
from ckdist.models.state_mixers import Mamba2
from ckdist.program.routing import Routing

KEYS = granite.KEYS.but(
    defaults={
        "num_experts_per_tok": 2, "num_local_experts": 8, "router_aux_loss_coef": 0.001, "shared_intermediate_size": 0,
    },
    only={"normalization_function": "rmsnorm"},
    unused=("init_method", "mlp_bias"),
)  # fmt: skip
ROUTING = Routing(used=2)
SHARED = ("expert_shared_feed_forward_length",)


def experts(f: Fields) -> MoeFfn:
    """Reads the experts from a config.json."""
    shared = f.integer("shared_intermediate_size", low=0, high=limits.MAX_FFN)
    return from_config.experts(f, "num_local_experts", "intermediate_size", ROUTING, shared_size=shared)


def config(f: Fields, outer: Fields) -> ModelSpec:
    return granite.model(f, outer, experts(f), **from_config.balance(f))


def gguf(header: GgufHeader) -> ModelSpec:
    return granite.gguf_model(header, header.experts(ROUTING, shared=True))


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model. Raises ArchitectureError if it has no rotation and no Mamba layers."""
    from ckdist.models import to_gguf

    more = to_gguf.experts(spec, where, SHARED)
    if spec.mixers(Mamba2):
        return hybrid_form(spec, where, more)
    if not spec.layers[0].attention.rope:
        raise ArchitectureError(f"{where}: {spec.family} without rotation has no GGUF form: its readers rotate")
    return granite.form("granitemoe", spec, where, more)


def hybrid_form(spec: ModelSpec, where: str, more: Mapping[str, Any]) -> GgufForm:
    """Returns the GGUF metadata of a model with Mamba layers. Raises ArchitectureError if it has a rotation."""
    if any(mixer.rope for mixer in spec.mixers(Attention)):
        raise ArchitectureError(f"{where}: {spec.family} with Mamba layers and a rotation has no GGUF form")
    return granite.form("granitehybrid", spec, where, {**mamba2_fields.metadata(spec, where), **more})


FAMILY = replace(
    granite.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    safetensors=family.SAFETENSORS.but_in_layers(
        {
            "block_sparse_moe.router.layer": "mlp.gate",
            "block_sparse_moe.input_linear": family.GATE_UP,
            "block_sparse_moe.output_linear": family.DOWN,
            "shared_mlp.input_linear": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
            "shared_mlp.output_linear": "mlp.shared_expert.down_proj",
            **mamba2_fields.SAFETENSORS,
        },
        (r".*block_sparse_moe\.(input|output)_linear\.weight", "stacked"),
    ),
    gguf_names=family.GGUF_EXPERTS.but_in_layers(mamba2_fields.GGUF, family.INTERLEAVED, mamba2_fields.GGUF_FORM),
    gguf_values=mamba2_fields.gguf_values,
)
