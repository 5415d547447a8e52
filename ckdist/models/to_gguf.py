"""A ModelSpec as GGUF metadata: the way back of `from_gguf`. It writes no file."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.models import rope
from ckdist.models.spec import ModelSpec, RopeSpec


def gguf_metadata(
    spec: ModelSpec, rope_theta: float, rope_local_theta: float, where: str, scaling: Mapping[str, Any] | None = None
) -> tuple[dict[str, object], np.ndarray | None]:
    """Keys and values, and the factors of `rope_freqs.weight` (head_dim / 2,) where the model needs them.

    `scaling` is config.json's, of the rotation.

    ArchitectureError, beginning with `where`, for what GGUF's readers cannot be told.
    """
    family = "llama" if spec.architecture == "mistral" else spec.architecture
    if spec.architecture == "mistral" and spec.sliding_window:
        raise ArchitectureError(
            f"{where}: a Mistral with a sliding window ({spec.sliding_window}) "
            "has no GGUF form that readers honour; set sliding_window to null if sequences stay shorter"
        )
    if spec.architecture.startswith("qwen") and spec.sliding_window:
        raise ArchitectureError(
            f"{where}: a sliding window ({spec.sliding_window}) of {spec.architecture} has no GGUF form; "
            "set use_sliding_window to false"
        )
    values: dict[str, object] = {
        "block_count": spec.num_layers,
        "context_length": spec.max_position,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.norm_eps),
        "rope.freq_base": float(rope_theta),
        "vocab_size": spec.vocab_size,
    }
    if family == "llama":
        values["rope.dimension_count"] = spec.head_dim
    if spec.sliding_window:
        values["attention.sliding_window"] = spec.sliding_window
    if family == "gemma3" and spec.sliding_layers:
        values["attention.sliding_window_pattern"] = list(spec.sliding_layers)
        values["rope.freq_base_swa"] = float(rope_local_theta)
    if spec.attention_soft_cap:
        values["attn_logit_softcapping"] = float(spec.attention_soft_cap)
    if spec.logit_soft_cap:
        values["final_logit_softcapping"] = float(spec.logit_soft_cap)
    if scaling and (scaling.get("rope_type") or scaling.get("type")) == "yarn":
        return _named(family, values | _yarn(spec, rope_theta, where, scaling)), None
    keys, factors = _scaling(spec.rope, spec.head_dim, rope_theta, family, where)
    return _named(family, values | keys), factors


def _named(family: str, values: Mapping[str, object]) -> dict[str, object]:
    """The keys with the family before each, and the family itself."""
    return {"general.architecture": family, **{f"{family}.{name}": value for name, value in values.items()}}


def _yarn(spec: ModelSpec, theta: float, where: str, scaling: Mapping[str, Any]) -> dict[str, object]:
    """YaRN by its own fields; its magnitude is that of the factor times attn_factor."""
    original = int(scaling.get("original_max_position_embeddings") or spec.max_position)
    factor = float(scaling.get("factor") or spec.max_position / original)
    fast, slow = float(scaling.get("beta_fast") or 32.0), float(scaling.get("beta_slow") or 1.0)
    expected = rope.yarn(rope.plain(spec.head_dim, theta), theta, factor, original, fast, slow)
    if not np.allclose(expected, spec.rope.inverse_frequencies, rtol=1e-5):
        raise ArchitectureError(
            f"{where}: a YaRN rotation that does not round to whole dimensions (truncate: false) has no GGUF form"
        )
    keys = {
        "type": "yarn",
        "factor": factor,
        "original_context_length": original,
        "attn_factor": spec.rope.magnitude / rope.yarn_magnitude(factor),
    }
    return {
        f"rope.scaling.{name}": value
        for name, value in {**keys, "yarn_beta_fast": fast, "yarn_beta_slow": slow}.items()
    }


def _scaling(
    spec: RopeSpec, head_dim: int, theta: float, family: str, where: str
) -> tuple[dict[str, object], np.ndarray | None]:
    """How frequencies differ from plain ones: by one factor, or, which only Llama's readers take, by one for each."""
    factors = rope.plain(head_dim, theta) / spec.inverse_frequencies.astype(np.float64)
    if np.allclose(factors, 1.0, rtol=1e-5):
        return {}, None
    if np.allclose(factors, factors[0], rtol=1e-5):
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(factors[0])}, None
    if family != "llama":
        raise ArchitectureError(f"{where}: {family} with a scaled rotation of this kind has no GGUF form")
    return {}, factors.astype(np.float32)
