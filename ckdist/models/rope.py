"""The inverse frequencies of rotary position embeddings under each scaling. It does not rotate anything."""

import math

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.models.fields import Fields
from ckdist.models.spec import RopeSpec

KNOWN_SCALINGS = ("default", "linear", "llama3", "yarn")


def plain(head_dim: int, theta: float) -> np.ndarray:
    """Theta ** (-2 i / head_dim), float64 (head_dim / 2,). Su et al. 2021, arXiv:2104.09864, section 3.2.2."""
    return theta ** -(np.arange(0, head_dim, 2) / head_dim)


def linear(frequencies: np.ndarray, factor: float) -> np.ndarray:
    """Positions divided by `factor`. Chen et al. 2023, arXiv:2306.15595."""
    return frequencies / factor


def llama3(
    frequencies: np.ndarray, factor: float, low_freq: float, high_freq: float, original_context: int
) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended. Llama 3.1 model card."""
    turns = original_context * frequencies / (2 * math.pi)  # over the original context
    keep = np.clip((turns - low_freq) / (high_freq - low_freq), 0, 1)
    return frequencies * (keep + (1 - keep) / factor)


def yarn(
    frequencies: np.ndarray,
    theta: float,
    factor: float,
    original_context: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool = True,
) -> np.ndarray:
    """Interpolation of slow dimensions, extrapolation of fast ones. Peng et al. 2023, arXiv:2309.00071, section 3.2."""
    head_dim = 2 * len(frequencies)

    def dimension(rotations: float) -> float:
        """The dimension that turns so often over the original context."""
        return head_dim * math.log(original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    interpolate = np.clip((np.arange(len(frequencies)) - low) / (high - low), 0, 1)
    return frequencies * (interpolate / factor + 1 - interpolate)


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """The factor on cos and sin. Peng et al. 2023, section 3.4, equation 22 (its square root, on q and k each)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def from_fields(scaling: Fields, head_dim: int, theta: float, max_position: int) -> RopeSpec:
    """The rotation that `rope_parameters` or `rope_scaling` of a config.json describes; `theta` where it gives none."""
    kind = scaling.text("rope_type", None) or scaling.text("type", "default")
    theta = scaling.number("rope_theta", theta, low=1.0)
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        raise scaling.error(
            "partial_rotary_factor", scaling.values["partial_rotary_factor"], "1: partial rotation is not supported"
        )
    frequencies = plain(head_dim, theta)
    magnitude = 1.0
    if kind == "linear":
        frequencies = linear(frequencies, scaling.number("factor", low=1e-6, high=1e6))
    elif kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if low >= high:
            raise scaling.error("low_freq_factor", low, f"below high_freq_factor, which is {high:g}")
        original = scaling.integer("original_max_position_embeddings", max_position, high=1 << 30)
        frequencies = llama3(frequencies, scaling.number("factor", low=1e-6, high=1e6), low, high, original)
    elif kind == "yarn":
        original = scaling.integer("original_max_position_embeddings", max_position, high=1 << 30)
        factor = scaling.number("factor", max_position / original, low=1e-6, high=1e6)
        betas = scaling.number("beta_fast", 32.0), scaling.number("beta_slow", 1.0)
        frequencies = yarn(frequencies, theta, factor, original, *betas, scaling.flag("truncate", True))
        magnitude = yarn_magnitude(factor)
        scales = scaling.number("mscale", 0.0, low=-1.0), scaling.number("mscale_all_dim", 0.0, low=-1.0)
        if all(scales):
            magnitude = yarn_magnitude(factor, scales[0]) / yarn_magnitude(factor, scales[1])
        magnitude = scaling.number("attention_factor", magnitude, high=1e3)
    elif kind != "default":
        raise unknown_scaling(scaling.where, kind)
    return RopeSpec(frequencies.astype(np.float32), magnitude)


def unknown_scaling(where: str, kind: str) -> ModelFileError:
    """The error for a scaling that is not known."""
    return ModelFileError(
        f"{where}: RoPE scaling {kind[:100]!r} is not known; the known ones are {', '.join(KNOWN_SCALINGS)}"
    )
