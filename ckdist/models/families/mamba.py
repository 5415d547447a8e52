"""Mamba and Falcon Mamba: Mamba-1 in every layer, without feed-forwards."""

from ckdist.models import from_config, limits, mamba1_fields
from ckdist.models.config_keys import ConfigKeys, sizes
from ckdist.models.families import family
from ckdist.models.families.family import Family, GgufForm, GgufHeader, in_layers
from ckdist.models.fields import Fields
from ckdist.models.from_config import Sizes
from ckdist.models.spec import LayerSpec, ModelSpec
from ckdist.models.state_mixers import Mamba1

MAX_POSITION = 1 << 20  # states have no limit; converters to GGUF write this number
KEYS = ConfigKeys(
    {
        **sizes(hidden=768, layers=32, heads=1, positions=MAX_POSITION, vocab=50280),  # there is no attention
        "conv_kernel": 4, "expand": 2, "hidden_act": "silu", "layer_norm_epsilon": 1e-5,
        "mixer_rms_eps": mamba1_fields.UNIT_EPS, "state_size": 16, "time_step_rank": "auto",
        "tie_word_embeddings": True, "use_conv_bias": True,
    },
    aliases={"d_inner": "intermediate_size", "d_model": "hidden_size", "n_layer": "num_hidden_layers"},
    only={"hidden_act": "silu", "rms_norm": True},
    unused=(  # initial values, how another program computes the same, and kinds of layers
        *("time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_min", "time_step_scale"),
        *("rescale_prenorm_residual", "residual_in_fp32", "fused_add_norm", "ssm_cfg", "layer_types", "mixer_rms_eps"),
        *("use_mambapy", "use_associative_scan", "use_falcon_mambapy", "num_attention_heads"),
    ),
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json. Falcon Mamba norms b, c and the low rank without weights."""
    n = from_config.sizes(f, "layer_norm_epsilon")
    falcon = "Falcon" in str(f.raw("architectures")) or f.raw("model_type") == "falcon_mamba"
    mixer = Mamba1(
        f.integer("intermediate_size", n.hidden_size * f.integer("expand", high=64), high=limits.MAX_WIDTH),
        f.integer("state_size", high=limits.MAX_HEAD_DIM),
        mamba1_fields.dt_rank(f, "time_step_rank", n.hidden_size),
        f.integer("conv_kernel", low=2, high=limits.MAX_CONV),
        f.flag("use_conv_bias"),
        f.flag("use_bias"),
        "unit" if falcon else "",
        f.number("mixer_rms_eps", high=1.0) if falcon else 0.0,
    )
    return from_config.model(f, outer, n, [LayerSpec(mixer, None)] * n.num_layers, {})


def gguf(header: GgufHeader) -> ModelSpec:
    f = header.fields
    count, hidden = f.integer("block_count", high=limits.MAX_LAYERS), f.integer("embedding_length", high=1 << 20)
    position, eps = f.integer("context_length", high=limits.MAX_POSITION), "attention.layer_norm_rms_epsilon"
    n = Sizes(count, hidden, 1, 1, hidden, header.rows("token_embd"), position, f.number(eps, high=1.0))
    mixer = mamba1_fields.from_gguf(header, "unit" if f.flag("ssm.dt_b_c_rms") else "")
    return header.model(n, [LayerSpec(mixer, None)] * n.num_layers, {})


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    values = {
        "block_count": len(spec.layers),
        "context_length": spec.max_position,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": float(spec.norm_eps),
        "vocab_size": spec.vocab_size,
        **mamba1_fields.metadata(spec, where),
        "ssm.dt_b_c_rms": any(mixer.norms for mixer in spec.mixers(Mamba1)),
    }
    return GgufForm({"general.architecture": "mamba", **{f"mamba.{name}": value for name, value in values.items()}})


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    safetensors=family.SAFETENSORS.but({
        "backbone.embeddings": "model.embed_tokens",
        "backbone.norm_f": "model.norm",
        **in_layers("backbone.layers", {
            "norm": "input_layernorm",
            **{f"mixer.{name}": target for name, target in mamba1_fields.TENSORS.items()},
        }),
    }),
    gguf_names=family.GGUF.but_in_layers(mamba1_fields.GGUF, mamba1_fields.GGUF_FORM),
    gguf_values=mamba1_fields.gguf_values,
)  # fmt: skip
