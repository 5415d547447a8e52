"""Granite 4: Mamba-2 in most layers, or in none. Models with experts are read as granitemoe, with its tensors."""

from dataclasses import replace

from ckdist.models import from_config, limits, mamba2_fields
from ckdist.models.families import family, granite, granitemoe
from ckdist.models.families.family import Fields, GgufForm, GgufHeader
from ckdist.models.mamba2_fields import FULL, MAMBA
from ckdist.models.spec import DenseFfn, ModelSpec
from ckdist.models.state_mixers import Mamba2

KEYS = granitemoe.KEYS.but(
    defaults={"shared_intermediate_size": 1024, **mamba2_fields.DEFAULTS},
    aliases={"layers_block_type": "layer_types"},
    unused=(
        *("intermediate_size", "num_experts_per_tok", "router_aux_loss_coef"),  # if there are no experts
        *(*mamba2_fields.DEFAULTS, "time_step_limit"),  # if there are no Mamba layers
        "mamba_chunk_size",
    ),
)


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    types = from_config.layer_kinds(f, n.num_layers, (*MAMBA, *FULL)) or [MAMBA[1]] * n.num_layers
    rotates = f.choice("position_embedding_type", ("rope", "nope"), "nope") == "rope"
    mamba = mamba2_fields.read(f, n) if set(types) & {*MAMBA} else None
    mixers = tuple(mamba if kind in MAMBA else None for kind in types)
    if f.integer("num_local_experts", low=0, high=limits.MAX_EXPERTS):
        more = {"family": "granitemoe", **from_config.balance(f)}
        return granite.model(f, outer, granitemoe.experts(f), rotates, mixers, **more)
    ffn = DenseFfn(f.integer("shared_intermediate_size", high=limits.MAX_FFN), from_config.activation(f))
    return granite.model(f, outer, ffn, rotates, mixers)


def gguf(header: GgufHeader) -> ModelSpec:
    mamba, is_mixture = mamba2_fields.from_gguf(header), header.is_mixture()
    count = header.fields.integer("block_count", high=limits.MAX_LAYERS)
    full = header.layers_with("attention.head_count_kv", count)
    # files of Bamba, whose heads are reordered as if all rotated
    if header.fields.flag("rope.scaling.finetuned", True):
        raise header.fields.error("rope.scaling.finetuned", True, "false: rotation is not supported in this form")
    ffn = header.experts(granitemoe.ROUTING, shared=True) if is_mixture else header.dense()
    mixers = tuple(None if is_full else mamba for is_full in full)
    return granite.gguf_model(header, ffn, mixers, "granitemoe" if is_mixture else "")


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model without experts."""
    return granitemoe.hybrid_form(spec, where, {}) if spec.mixers(Mamba2) else granite.export(spec, where)


FAMILY = replace(
    granite.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    safetensors=family.SAFETENSORS.but_in_layers({
        "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
        "shared_mlp.output_linear": "mlp.down_proj",
        **mamba2_fields.SAFETENSORS,
    }),
    gguf_names=granite.FAMILY.gguf_names.but_in_layers(mamba2_fields.GGUF, mamba2_fields.GGUF_FORM),
    gguf_values=mamba2_fields.gguf_values,
)  # fmt: skip
