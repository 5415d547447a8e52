"""Scales rotary position embeddings to longer contexts."""

import math
from dataclasses import replace

import numpy as np

from ckdist.models.fields import Fields
from ckdist.models.rope import RopeShape, plain, unknown_scaling
from ckdist.models.spec import RopeSpec


def llama3(
    frequencies: np.ndarray, factor: float, low_freq: float, high_freq: float, original_context: int
) -> np.ndarray:
    """Stretches long wavelengths by `factor`, keeps short ones, and blends between both. Llama 3.1 model card."""
    turns = original_context * frequencies / (2 * math.pi)  # rotations over the original context
    keep = np.clip((turns - low_freq) / max(high_freq - low_freq, 1e-30), 0, 1)  # a step if both are equal
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
    """Interpolates slow dimensions, extrapolates fast ones. Peng et al. 2023, arXiv:2309.00071, section 3.2."""
    head_dim = 2 * len(frequencies)

    def dimension(rotations: float) -> float:
        """The dimension with this number of rotations over the original context."""
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
    """The factor on cos and sin. Peng et al. 2023, section 3.4, equation 22 (the square root, for q and k each)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def longrope_magnitude(factor: float, original_context: int) -> float:
    """The factor on cos and sin for longrope, as in transformers. `factor` is that of the context."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_context))


def scaled(rotation: RopeSpec, kind: str, scaling: Fields, shape: RopeShape) -> RopeSpec:
    """Scales a plain rotation in the way `kind`, by the fields of `scaling`."""
    frequencies, theta, magnitude = rotation.inverse_frequencies, rotation.theta, 1.0
    original = lambda: scaling.integer("original_max_position_embeddings", shape.max_position, high=1 << 30)
    if kind == "linear":  # divides positions, and so frequencies: Chen et al. 2023, arXiv:2306.15595
        frequencies = frequencies / scaling.number("factor", low=1e-6, high=1e6)
    elif kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if low > high:
            raise scaling.error("low_freq_factor", low, f"at most high_freq_factor, which is {high:g}")
        frequencies = llama3(frequencies, scaling.number("factor", low=1e-6, high=1e6), low, high, original())
    elif kind == "yarn":
        factor = scaling.number("factor", shape.max_position / original(), low=1e-6, high=1e6)
        betas = scaling.number("beta_fast", 32.0), scaling.number("beta_slow", 1.0)
        frequencies = yarn(frequencies, theta, factor, original(), *betas, scaling.flag("truncate", True))
        magnitude = yarn_magnitude(factor)
        scales = scaling.number("mscale", 0.0, low=-1.0), scaling.number("mscale_all_dim", 0.0, low=-1.0)
        if all(scales):
            magnitude = yarn_magnitude(factor, scales[0]) / yarn_magnitude(factor, scales[1])
        magnitude = scaling.number("attention_factor", magnitude, high=1e3)
    elif kind == "proportional":  # the fraction of pairs that rotate, with the frequencies of a whole head
        share = scaling.number("partial_rotary_factor", 1.0, high=1.0)
        frequencies = frequencies / scaling.number("factor", 1.0, low=1e-6, high=1e6)
        frequencies[int(share * shape.head_dim // 2) :] = 0
    elif kind == "dynamic" and (alpha := scaling.number("alpha", 0.0, low=-1.0, high=1e6)):
        dims = rotation.dims
        theta *= alpha ** (dims / (dims - 2))  # NTK-aware scaling with a fixed factor (Hunyuan)
        frequencies = plain(dims, theta)
    elif kind == "dynamic":  # changes frequencies only beyond max_position, which is the longest context
        scaling.number("factor", low=1e-6, high=1e6)
    else:
        raise unknown_scaling(scaling.where, kind)
    return replace(rotation, inverse_frequencies=frequencies, theta=theta, magnitude=magnitude)


def longrope_rotation(scaling: Fields, shape: RopeShape, outer: Fields, rotation: RopeSpec) -> RopeSpec:
    """The rotation for contexts up to the original one; its `long` is for longer contexts.

    Each frequency is divided by its own factor. Ding et al. 2024, arXiv:2402.13753.
    """
    name = "original_max_position_embeddings"
    absent = scaling.integer(name, shape.max_position, low=2, high=1 << 30)
    original = outer.integer(name, absent, low=2, high=1 << 30)  # Phi-3's field, before that of its scaling
    factor = scaling.number("factor", shape.max_position / original, low=1e-6, high=1e6)
    magnitude = scaling.number("attention_factor", longrope_magnitude(factor, original), high=1e3)
    rotation = replace(rotation, magnitude=magnitude, scaling=dict(scaling.values))

    def divided(name: str) -> RopeSpec:
        """The rotation with the factors in the field `name`."""
        factors = np.asarray(scaling.numbers(name, rotation.dims // 2, low=1e-6))
        return replace(rotation, inverse_frequencies=(rotation.inverse_frequencies / factors).astype(np.float32))

    return replace(divided("short_factor"), long=divided("long_factor"), original_context=original)
