"""Granite 4 without Mamba layers. Models with experts are read as granitemoe, whose names of tensors they have."""

from dataclasses import replace

from ckdist.models import from_config, limits
from ckdist.models.families import family, granite, granitemoe
from ckdist.models.families.family import in_layers
from ckdist.models.fields import Fields
from ckdist.models.spec import DenseFfn, ModelSpec

NAME = "granitemoehybrid"
KEYS = granitemoe.KEYS.but(
    defaults={"shared_intermediate_size": 1024},
    aliases={"layers_block_type": "layer_types"},
    unused=(
        *("intermediate_size", "num_experts_per_tok", "router_aux_loss_coef"),  # if there are no experts
        *(f"mamba_{name}" for name in ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand", "chunk_size")),
        *("mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
    ),
)
ATTENTION = ("attention", "full_attention")  # names in published and in newer files


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    count = f.integer("num_hidden_layers", high=limits.MAX_LAYERS)
    types = f.raw("layer_types")
    if not isinstance(types, list) or len(types) != count or any(kind not in ATTENTION for kind in types):
        raise f.error("layer_types", types, f"attention for each of {count} layers: Mamba layers are not supported")
    position = f.text("position_embedding_type", "nope")
    if position not in ("rope", "nope"):
        raise f.error("position_embedding_type", position, "rope or nope")
    rotates = position == "rope"
    if f.integer("num_local_experts", low=0, high=limits.MAX_EXPERTS):
        return granite.model(granitemoe.NAME, f, outer, granitemoe.experts(f), rotates, **from_config.balance(f))
    ffn = DenseFfn(f.integer("shared_intermediate_size", high=limits.MAX_FFN), from_config.activation(f))
    return granite.model(NAME, f, outer, ffn, rotates)


FAMILY = replace(
    granite.FAMILY,
    name=NAME,
    architectures=("GraniteMoeHybridForCausalLM",),
    model_types=("granitemoehybrid",),
    keys=KEYS,
    from_config=config,
    from_gguf=None,
    safetensors=family.SAFETENSORS.but(
        in_layers(
            "model.layers",
            {
                "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
                "shared_mlp.output_linear": "mlp.down_proj",
            },
        )
    ),
)
