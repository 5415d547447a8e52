"""A ModelSpec from the metadata of a GGUF model and the shapes of its tensors. It reads no file.

What GGUF leaves unsaid (soft caps, windows, scales of Gemma) takes the values that the published models have.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.models import architectures, rope
from ckdist.models.fields import Fields
from ckdist.models.spec import ModelSpec, RopeSpec


def spec_from_gguf(
    metadata: Mapping[str, Any], dims: Mapping[str, tuple[int, ...]], where: str, rope_factors: np.ndarray | None = None
) -> ModelSpec:
    """The model that `metadata` describes.

    `dims` are the dimensions of the model's tensors by GGUF's names, the contiguous one first; `rope_factors`: the
    contents of `rope_freqs.weight` (head_dim / 2,), by which frequencies are divided, where the model has it.
    Raises ArchitectureError for an unknown family and ModelFileError for a wrong field; both begin with `where`.
    """
    family = Fields(metadata, where).text("general.architecture")
    if family not in architectures.BY_GGUF:
        raise architectures.unknown(where, family, architectures.BY_GGUF)
    f = Fields(
        {k[len(family) + 1 :]: v for k, v in metadata.items() if k.startswith(f"{family}.")}, where, f"{family}."
    )
    if f.integer("expert_count", 0, low=0):
        raise f.error("expert_count", f.values["expert_count"], "0: mixtures of experts are not supported")
    gemma = family in ("gemma2", "gemma3")

    num_layers = f.integer("block_count", high=architectures.MAX_LAYERS)
    hidden_size = f.integer("embedding_length", high=architectures.MAX_WIDTH)
    num_heads = _per_layer(f, "attention.head_count", architectures.MAX_HEADS)
    num_kv_heads = (
        _per_layer(f, "attention.head_count_kv", architectures.MAX_HEADS)
        if f.has("attention.head_count_kv")
        else num_heads
    )
    head_dim = _head_dim(f, hidden_size, num_heads)
    embedding = dims.get("token_embd.weight")
    if embedding is None or len(embedding) != 2 or embedding[1] > architectures.MAX_VOCAB:
        allowed = f"2 dimensions and at most {architectures.MAX_VOCAB} rows"
        raise ModelFileError(f"{where}: token_embd.weight must be there with {allowed}; it has {embedding}")
    sliding_window, sliding_layers = _sliding(f, family, num_layers)
    rope_global, rope_local = _rope(f, family, head_dim, rope_factors)

    return architectures.checked(
        ModelSpec(
            architecture=family,
            vocab_size=embedding[1],
            hidden_size=hidden_size,
            intermediate_size=_per_layer(f, "feed_forward_length", architectures.MAX_FFN),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=f.number("attention.layer_norm_rms_epsilon", high=1.0),
            max_position=f.integer("context_length", high=architectures.MAX_POSITION),
            rope=rope_global,
            rope_local=rope_local,
            qkv_bias="blk.0.attn_q.bias" in dims,
            o_bias="blk.0.attn_output.bias" in dims,
            mlp_bias="blk.0.ffn_gate.bias" in dims,
            qk_norm="blk.0.attn_q_norm.weight" in dims,
            post_norms=gemma,
            activation="gelu_tanh" if gemma else "silu",
            tie_embeddings="output.weight" not in dims,
            embedding_scale=math.sqrt(hidden_size) if gemma else 1.0,
            attention_scale=_attention_scale(f, family, num_layers, hidden_size, num_heads, head_dim),
            attention_soft_cap=f.number("attn_logit_softcapping", 50.0 if family == "gemma2" else 0.0, high=1e6),
            logit_soft_cap=f.number("final_logit_softcapping", 30.0 if family == "gemma2" else 0.0, high=1e6),
            sliding_window=sliding_window,
            sliding_layers=sliding_layers,
        ),
        where,
    )


def _per_layer(f: Fields, name: str, high: int) -> int:
    """A number that GGUF may give once or once per layer; layers that differ are not supported."""
    value = f.values.get(name)
    if isinstance(value, np.ndarray):
        if value.size == 0 or (value != value[0]).any():
            raise f.error(name, np.unique(value)[:8].tolist(), "the same in every layer")
        return Fields({name: value[0].item()}, f.where, f.prefix).integer(name, high=high)
    return f.integer(name, high=high)


def _head_dim(f: Fields, hidden_size: int, num_heads: int) -> int:
    """Elements of a head. ModelFileError where queries, values and rotation differ in it."""
    if not f.has("attention.key_length") and hidden_size % num_heads:
        raise f.error(
            "embedding_length",
            hidden_size,
            f"divisible by the {num_heads} heads, or attention.key_length must be given",
        )
    head_dim = f.integer("attention.key_length", hidden_size // num_heads, high=architectures.MAX_HEAD_DIM)
    for name in ("attention.value_length", "rope.dimension_count"):
        other = f.integer(name, head_dim, high=architectures.MAX_HEAD_DIM)
        if other != head_dim:
            raise f.error(name, other, f"the same as the heads' size, {head_dim}")
    return head_dim


def _attention_scale(f: Fields, family: str, num_layers: int, hidden_size: int, num_heads: int, head_dim: int) -> float:
    """The factor on q.k."""
    # The 27B models of both Gemma generations scale by the width per head, all others by head_dim; GGUF does not say.
    if (family, num_layers) in (("gemma2", 46), ("gemma3", 62)):
        return f.number("attention.scale", (hidden_size // num_heads) ** -0.5)
    return f.number("attention.scale", head_dim**-0.5)


def _sliding(f: Fields, family: str, num_layers: int) -> tuple[int, tuple[bool, ...]]:
    """The window (0: none) and which layers slide."""
    if family in ("qwen2", "qwen3"):
        return 0, ()
    default = {"gemma2": [4096]}.get(family, [] if family == "gemma3" else [0])
    window = f.integer("attention.sliding_window", *default, low=0, high=architectures.MAX_POSITION)
    pattern = f.values.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        if pattern.dtype != bool or len(pattern) != num_layers:
            raise f.error(
                "attention.sliding_window_pattern",
                f"{len(pattern)} values",
                f"one flag for each of {num_layers} layers",
            )
        layers = tuple(pattern.tolist())
    else:
        period = f.integer("attention.sliding_window_pattern", {"gemma2": 2, "gemma3": 6}.get(family, 0), low=0)
        layers = tuple(period == 0 or (i + 1) % period != 0 for i in range(num_layers))
    return (window, layers) if window and any(layers) else (0, ())


def _rope(f: Fields, family: str, head_dim: int, factors: np.ndarray | None) -> tuple[RopeSpec, RopeSpec | None]:
    """The rotation of full and, where it differs, of sliding layers."""
    theta = f.number("rope.freq_base", 1e6 if family == "gemma3" else 1e4, low=1.0)
    kind = f.text("rope.scaling.type", "linear")
    factor = f.number("rope.scaling.factor", f.number("rope.scale_linear", 1.0, low=1e-6, high=1e6), low=1e-6, high=1e6)
    magnitude = f.number("rope.scaling.attn_factor", f.number("rope.scaling.yarn_attn_factor", 1.0, high=1e3), high=1e3)
    frequencies = rope.plain(head_dim, theta)
    if kind == "linear":
        frequencies = rope.linear(frequencies, factor)
    elif kind == "yarn":
        original = f.integer(
            "rope.scaling.original_context_length", f.integer("context_length"), high=architectures.MAX_POSITION
        )
        fast, slow = f.number("rope.scaling.yarn_beta_fast", 32.0), f.number("rope.scaling.yarn_beta_slow", 1.0)
        frequencies = rope.yarn(frequencies, theta, factor, original, fast, slow)
        magnitude *= rope.yarn_magnitude(factor)
    elif kind != "none":
        raise rope.unknown_scaling(f.where, kind)
    if factors is not None:
        if factors.shape != frequencies.shape:
            raise ModelFileError(
                f"{f.where}: rope_freqs.weight has shape {factors.shape}; heads of {head_dim} need {frequencies.shape}"
            )
        if not (factors >= 1e-6).all():
            raise ModelFileError(
                f"{f.where}: rope_freqs.weight has the factor {factors.min()}; factors must be at least 1e-06"
            )
        frequencies = frequencies / factors
    spec = RopeSpec(frequencies.astype(np.float32), magnitude)
    if family != "gemma3":
        return spec, None
    local_theta = f.number("rope.freq_base_swa", 1e4, low=1.0)
    return spec, RopeSpec(rope.plain(head_dim, local_theta).astype(np.float32))
