"""RoPE scaling of a base model for contexts that are longer than its own."""

from collections.abc import Mapping
from typing import Any

from ckdist.errors import ConfigError

KINDS = ("linear", "yarn", "llama3")
BY_LAYERS = ("full_attention", "sliding_attention")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of the Llama 3.1 model card
ORIGINAL = "original_max_position_embeddings"


def parse(text: str) -> dict[str, Any]:
    """The scaling that `KIND:FACTOR` names. Raises ConfigError if the factor is no number."""
    kind, _, factor = text.partition(":")
    try:
        return {"rope_type": kind, "factor": float(factor)}
    except ValueError:
        raise ConfigError(f"--rope-scaling ({text:.40}) must be KIND:FACTOR, for example yarn:4") from None


def stretched(values: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with another RoPE scaling, and `factor` times the original positions.

    Raises ConfigError for a scaling without a kind or a factor, or a model that has none of its own.
    """
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    if kind not in KINDS or isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= 1e4:
        raise ConfigError(
            f"rope_scaling has rope_type {kind!r:.40} and factor {factor!r:.40}: it needs one of {', '.join(KINDS)}, "
            "and a factor from 1 to 10000"
        )
    name = "rope_parameters" if "rope_parameters" in values else "rope_scaling"
    own, positions = values.get(name) or {}, values.get("max_position_embeddings")
    if not isinstance(positions, int) or any(part in own for part in BY_LAYERS):
        raise ConfigError("rope_scaling cannot be set for this model: its layers differ; write it into its config.json")
    if own.get("rope_type", own.get("type")) == "linear":
        positions = int(positions / own.get("factor", 1))
    original = scaling.get(ORIGINAL, own.get(ORIGINAL, positions))
    theta = {"rope_theta": own["rope_theta"]} if "rope_theta" in own else {}
    more = {**(LLAMA3 if kind == "llama3" else {}), **({} if kind == "linear" else {ORIGINAL: original})}
    made = {**theta, **more, **scaling, "rope_type": kind}
    return {**values, name: made, "max_position_embeddings": int(original * factor)}
