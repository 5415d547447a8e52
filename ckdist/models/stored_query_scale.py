"""Reads the scale of queries by their position, which models of Mistral have."""

from ckdist.models import limits
from ckdist.models.fields import Fields
from ckdist.program.query_scale import QueryScale


def config_query_scale(f: Fields) -> QueryScale | None:
    """Reads it from a config.json, among the parameters of the rotation; None: no scale."""
    parameters = f.sub("rope_parameters")
    beta = parameters.number("llama_4_scaling_beta", 0.0, low=-1e-9, high=1e3)
    length = "original_max_position_embeddings"
    return QueryScale(beta, parameters.integer(length, high=limits.MAX_POSITION)) if beta else None


def gguf_query_scale(f: Fields, beta: float = 0.0) -> QueryScale | None:
    """Reads it from GGUF metadata; None: no scale. `beta` is the default."""
    beta = f.number("attention.temperature_scale", beta, low=-1e-9, high=1e3)
    lengths = [f"{name}_length" for name in ("attention.temperature", "rope.scaling.original_context")]
    length = next((name for name in lengths if f.has(name)), lengths[0])
    return QueryScale(beta, f.integer(length, high=limits.MAX_POSITION)) if beta else None
