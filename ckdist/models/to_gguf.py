"""Converts the parts of a ModelSpec that most families share to GGUF metadata: the inverse of `from_gguf`."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.models import from_gguf, rope, rope_scaling
from ckdist.models.families.family import GgufForm, GgufWriter
from ckdist.models.spec import Attention, ModelSpec, MoeFfn, RopeSpec

# the function that GGUF readers use for an architecture; all others: silu
ACTIVATIONS = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "gemma-embedding"), "gelu_tanh"),
    **dict.fromkeys(("deepseek4", "glm5-next"), "clamped_silu"),
    **dict.fromkeys(("gpt-oss", "minimax-m3"), "clamped_swiglu"),
}
ACTIVATIONS |= {"kimi-k3": "situ"}
ACTIVATIONS |= dict.fromkeys(("arcee", "jais2", "nemotron_h", "nemotron_h_moe"), "relu2")


def form(writer: GgufWriter, architecture: str, spec: ModelSpec, where: str) -> GgufForm:
    """The GGUF form of a decoder, as `writer` describes it. Raises ArchitectureError if GGUF cannot describe it."""
    if writer.refused:
        raise ArchitectureError(f"{where}: {spec.family} has no GGUF form: {writer.refused}")
    windows = {mixer.window for mixer in spec.mixers(Attention)} - {0}
    if writer.windows and windows:
        what = f"a sliding window ({min(windows)}) of {spec.family} has no GGUF form"
        raise ArchitectureError(f"{where}: {what}; set {writer.windows}")
    if any(ffn.routing.renormalise == writer.renormalised for ffn in spec.mixtures()):
        which = str(writer.renormalised).lower()
        raise ArchitectureError(f"{where}: {spec.family} with norm_topk_prob {which} has no GGUF form")
    more = {
        **({"rope.dimension_count": spec.ropes["global"].dims} if writer.rotated else {}),
        **writer.more(spec, where),
        **({} if writer.experts is None else experts(spec, where, writer.experts)),
    }
    return dense(architecture, spec, where, more, writer.factors, writer.truncate)


def dense(
    architecture: str,
    spec: ModelSpec,
    where: str,
    more: Mapping[str, Any] | None = None,
    factors: bool = False,
    truncate: bool = True,
) -> GgufForm:
    """The GGUF form of a decoder whose layers have the same sizes.

    Args:
        architecture: `general.architecture`.
        spec: The model.
        where: Beginning of error messages.
        more: Further values.
        factors: GGUF readers support a factor for each frequency.
        truncate: GGUF readers round the limits of YaRN's blend to whole dimensions.

    Raises:
        ArchitectureError: GGUF cannot describe the model.
    """
    first = next((layer for layer in spec.layers if isinstance(layer.mixer, Attention)), spec.layers[0])
    mixer, ffns = first.attention, [layer.ffn for layer in spec.layers if layer.ffn is not None]
    own = ACTIVATIONS.get(architecture, "silu")
    if other := {ffn.activation for ffn in ffns} - {own}:
        raise ArchitectureError(
            f"{where}: {architecture} with the activation {other.pop()} has no GGUF form: its readers compute {own}"
        )
    rotation, vectors = _rotation(spec, architecture, where, factors, truncate) if spec.ropes else ({}, {})
    values = {
        "block_count": len(spec.layers),
        "context_length": spec.max_position,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": ffns[0].intermediate_size if ffns else 0,
        "attention.head_count": mixer.num_heads,
        "attention.head_count_kv": mixer.num_kv_heads,
        "attention.key_length": mixer.head_dim,
        "attention.value_length": mixer.value_width,
        "attention.layer_norm_rms_epsilon": float(spec.norm_eps),
        "vocab_size": spec.vocab_size,
        **rotation,
        **(more or {}),
    }
    named = {f"{architecture}.{name}": value for name, value in values.items()}
    return GgufForm({"general.architecture": architecture, **named}, vectors)


def experts(spec: ModelSpec, where: str, names: Collection[str] = ()) -> dict[str, Any]:
    """The values for the experts of a model, as argument `more` of `dense`.

    `names` are those of optional values that the architecture has. Raises ArchitectureError, which begins with `where`,
    if layers with experts differ, or if a dense layer follows them.
    """
    found = spec.mixtures()
    ffns = [layer.ffn for layer in spec.layers if layer.ffn is not None]
    dense_layers = len(ffns) - len(found)
    ordered = all(isinstance(ffn, MoeFfn) for ffn in ffns[dense_layers:])
    if len(set(found)) != 1 or not ordered:
        raise ArchitectureError(f"{where}: layers whose experts differ, or stop, have no GGUF form")
    ffn, routing = found[0], found[0].routing
    if dense_layers and "leading_dense_block_count" not in names:
        raise ArchitectureError(f"{where}: {dense_layers} first layers without experts have no GGUF form")
    more = {
        "leading_dense_block_count": dense_layers,
        "expert_shared_feed_forward_length": ffn.shared_size,
        "expert_shared_count": ffn.shared_size // ffn.intermediate_size,
        "expert_gating_func": from_gguf.GATING[routing.scores],
        "expert_weights_norm": routing.renormalise,
        "expert_weights_scale": routing.scale,
        "expert_group_count": routing.groups,
        "expert_group_used_count": routing.top_groups,
    }
    return {
        "expert_count": ffn.num_experts,
        "expert_used_count": routing.used,
        "expert_feed_forward_length": ffn.intermediate_size,
        **{name: more[name] for name in names},
    }


def _rotation(
    spec: ModelSpec, architecture: str, where: str, factors: bool, truncate: bool
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(metadata, tensors) for the scaling of frequencies: YaRN's fields, one factor, or a factor for each frequency."""
    r = spec.ropes["global"]
    base, plain = {"rope.freq_base": float(r.theta)}, rope.plain(r.dims, r.theta)
    of = lambda made: (plain / made.inverse_frequencies.astype(np.float64)).astype(np.float32)
    if r.long is not None:
        base |= {
            "rope.scaling.original_context_length": r.original_context, "rope.scaling.attn_factor": r.magnitude,
        }  # fmt: skip
        return base, {"rope_factors_short.weight": of(r), "rope_factors_long.weight": of(r.long)}
    if (r.scaling.get("rope_type") or r.scaling.get("type")) == "yarn":
        return {**base, **_yarn(spec, r, where, truncate)}, {}
    ratios = plain / r.inverse_frequencies.astype(np.float64)
    if np.allclose(ratios, 1.0, rtol=1e-5):
        return base, {}
    if np.allclose(ratios, ratios[0], rtol=1e-5):
        return {**base, "rope.scaling.type": "linear", "rope.scaling.factor": float(ratios[0])}, {}
    if not factors:
        raise ArchitectureError(f"{where}: {architecture} with a scaled rotation of this kind has no GGUF form")
    return base, {"rope_freqs.weight": of(r)}


def _yarn(spec: ModelSpec, r: RopeSpec, where: str, truncate: bool) -> dict[str, Any]:
    """The metadata of YaRN. Its magnitude is yarn_magnitude(factor) * attn_factor."""
    original = int(r.scaling.get("original_max_position_embeddings") or spec.max_position)
    factor = float(r.scaling.get("factor") or spec.max_position / original)
    fast, slow = float(r.scaling.get("beta_fast") or 32.0), float(r.scaling.get("beta_slow") or 1.0)
    expected = rope_scaling.yarn(rope.plain(r.dims, r.theta), r.theta, factor, original, fast, slow, truncate)
    if not np.allclose(expected, r.inverse_frequencies, rtol=1e-5):
        raise ArchitectureError(
            f"{where}: a YaRN rotation of {spec.family} with truncate {str(not truncate).lower()} has no GGUF form"
        )
    values = {
        "type": "yarn",
        "factor": factor,
        "original_context_length": original,
        "attn_factor": r.magnitude / rope_scaling.yarn_magnitude(factor),
        "yarn_beta_fast": fast,
        "yarn_beta_slow": slow,
    }
    return {f"rope.scaling.{name}": value for name, value in values.items()}
