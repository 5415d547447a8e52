"""A ModelSpec from the `config.json` of a Hugging Face folder. It reads no weights."""

import math
from collections.abc import Mapping
from typing import Any

from ckdist.models import architectures, rope
from ckdist.models.fields import Fields
from ckdist.models.spec import ModelSpec, RopeSpec

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}


def spec_from_config(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The model that `config` describes; absent fields take the defaults of transformers.

    Raises ArchitectureError for an unknown family and ModelFileError for a wrong field; both begin with `where`.
    """
    outer = Fields(config, where)
    family = _family(outer)
    f = outer.sub("text_config") if outer.has("text_config") else outer  # the language part of a multimodal model
    gemma = family in ("gemma2", "gemma3")

    num_layers = f.integer("num_hidden_layers", *([26] if gemma else []), high=architectures.MAX_LAYERS)
    hidden_size = f.integer("hidden_size", high=architectures.MAX_WIDTH)
    num_heads = f.integer("num_attention_heads", *([8] if gemma else []), high=architectures.MAX_HEADS)
    default_kv_heads = {"mistral": 8, "gemma2": 4, "gemma3": 4}.get(family, num_heads)
    num_kv_heads = f.integer("num_key_value_heads", default_kv_heads, high=architectures.MAX_HEADS)
    if f.has("head_dim"):
        head_dim = f.integer("head_dim", high=architectures.MAX_HEAD_DIM)
    elif gemma or family == "qwen3":
        head_dim = 256 if gemma else 128
    elif hidden_size % num_heads:
        raise f.error(
            "hidden_size", hidden_size, f"divisible by num_attention_heads ({num_heads}), or head_dim must be given"
        )
    else:
        head_dim = hidden_size // num_heads
    default_position = {"llama": 2048, "gemma2": 8192, "gemma3": 131072, "mistral": 131072}.get(family, 32768)
    max_position = f.integer("max_position_embeddings", default_position, high=architectures.MAX_POSITION)
    sliding_window, sliding_layers = _sliding(f, family, num_layers)
    rope_global, rope_local = _rope(f, family, head_dim, max_position)
    attention_bias = family != "mistral" and f.flag("attention_bias")
    if f.flag("use_bidirectional_attention"):
        raise f.error("use_bidirectional_attention", True, "false: only causal attention is supported")

    return architectures.checked(
        ModelSpec(
            architecture=family,
            vocab_size=f.integer("vocab_size", *([262208] if family == "gemma3" else []), high=architectures.MAX_VOCAB),
            hidden_size=hidden_size,
            intermediate_size=f.integer("intermediate_size", high=architectures.MAX_FFN),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=f.number("rms_norm_eps", 1e-6, high=1.0),
            max_position=max_position,
            rope=rope_global,
            rope_local=rope_local,
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=family != "qwen2" and attention_bias,
            mlp_bias=family == "llama" and f.flag("mlp_bias"),
            qk_norm=family in ("qwen3", "gemma3"),
            post_norms=gemma,
            activation=_activation(f, gemma),
            tie_embeddings=f.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", gemma)),
            embedding_scale=math.sqrt(hidden_size) if gemma else 1.0,
            attention_scale=f.number("query_pre_attn_scalar", 256.0) ** -0.5 if gemma else head_dim**-0.5,
            attention_soft_cap=_soft_cap(f, "attn_logit_softcapping", family, 50.0),
            logit_soft_cap=_soft_cap(f, "final_logit_softcapping", family, 30.0),
            sliding_window=sliding_window,
            sliding_layers=sliding_layers,
        ),
        where,
    )


def _family(f: Fields) -> str:
    """The model family by its names in the file. ArchitectureError where it is not known."""
    names = f.values.get("architectures")
    if names is not None and not (isinstance(names, list) and names and isinstance(names[0], str)):
        raise f.error("architectures", names, "a list of names")
    if names:
        if names[0] not in architectures.BY_CONFIG:
            raise architectures.unknown(f.where, names[0], architectures.BY_CONFIG)
        return architectures.BY_CONFIG[names[0]]
    model_type = f.text("model_type")
    if model_type not in architectures.BY_MODEL_TYPE:
        raise architectures.unknown(f.where, model_type, architectures.BY_MODEL_TYPE)
    return architectures.BY_MODEL_TYPE[model_type]


def _activation(f: Fields, gemma: bool) -> str:
    """The gate's function. ModelFileError where it is not known."""
    field = "hidden_activation" if gemma else "hidden_act"  # Gemma's hidden_act is not what it computes
    name = f.text(field, "gelu_pytorch_tanh" if gemma else "silu")
    if name not in ACTIVATIONS:
        raise f.error(field, name, f"one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _soft_cap(f: Fields, name: str, family: str, gemma2_default: float) -> float:
    """A soft cap on logits; 0 where there is none."""
    if family not in ("gemma2", "gemma3"):
        return 0.0
    absent = gemma2_default if family == "gemma2" and name not in f.values else 0.0  # a null there means none
    return f.number(name, absent, high=1e6)


def _sliding(f: Fields, family: str, num_layers: int) -> tuple[int, tuple[bool, ...]]:
    """The window (0: none) and which layers slide."""
    if family == "llama":
        return 0, ()
    default = 0 if "sliding_window" in f.values else 4096  # a null there means none
    window = f.integer("sliding_window", default, low=0, high=architectures.MAX_POSITION)
    if family in ("qwen2", "qwen3") and not f.flag("use_sliding_window"):
        window = 0
    types = f.values.get("layer_types")
    if family == "mistral":
        layers = [True] * num_layers
    elif types is not None:
        known = ("sliding_attention", "full_attention")
        if not isinstance(types, list) or len(types) != num_layers or any(t not in known for t in types):
            raise f.error("layer_types", types, f"a list of {num_layers} of {' and '.join(known)}")
        layers = [t == "sliding_attention" for t in types]
    elif family == "gemma2":
        layers = [i % 2 == 0 for i in range(num_layers)]
    elif family == "gemma3":
        pattern = f.integer("sliding_window_pattern", 6)
        layers = [(i + 1) % pattern != 0 for i in range(num_layers)]
    else:
        first = f.integer("max_window_layers", 28, low=0)
        layers = [i >= first for i in range(num_layers)]
    return (window, tuple(layers)) if window and any(layers) else (0, ())


def _rope(f: Fields, family: str, head_dim: int, max_position: int) -> tuple[RopeSpec, RopeSpec | None]:
    """The rotation of full and, where it differs, of sliding layers. Newer files write `rope_parameters`, older ones
    `rope_theta` and `rope_scaling`.
    """
    theta = f.number("rope_theta", 1e6 if family == "gemma3" else 1e4, low=1.0)
    parameters = f.sub("rope_parameters") if f.has("rope_parameters") else f.sub("rope_scaling")
    nested = parameters.has("full_attention") or parameters.has("sliding_attention")
    full = parameters.sub("full_attention") if nested else parameters
    spec = rope.from_fields(full, head_dim, theta, max_position)
    if family == "gemma3":
        local_theta = f.number("rope_local_base_freq", 1e4, low=1.0)
        return spec, rope.from_fields(parameters.sub("sliding_attention"), head_dim, local_theta, max_position)
    if nested and parameters.has("sliding_attention"):
        return spec, rope.from_fields(parameters.sub("sliding_attention"), head_dim, theta, max_position)
    return spec, None
