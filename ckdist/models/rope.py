"""Computes the inverse frequencies of rotary position embeddings with each kind of scaling."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.models.fields import Fields
from ckdist.models.spec import RopeSpec

KNOWN_SCALINGS = ("default", "mrope", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True)
class RopeShape:
    """The properties of a rotation without its scaling."""

    head_dim: int
    max_position: int
    theta: float  # default, if the fields of the scaling lack it
    partial: float | None = None  # rotated fraction of a head, as default; None: all, independent of the file
    interleaved: bool = False
    mrope_interleaved: bool = False  # default, if the fields of the scaling lack it


def plain(head_dim: int, theta: float) -> np.ndarray:
    """Returns theta ** (-2 i / head_dim), float64 (head_dim / 2,). Su et al. 2021, arXiv:2104.09864, section 3.2.2."""
    return theta ** -(np.arange(0, head_dim, 2) / head_dim)


def linear(frequencies: np.ndarray, factor: float) -> np.ndarray:
    """Divides positions, and so frequencies, by `factor`. Chen et al. 2023, arXiv:2306.15595."""
    return frequencies / factor


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


def longrope(frequencies: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Divides each frequency by its own factor. Ding et al. 2024, arXiv:2402.13753."""
    return frequencies / factors


def longrope_magnitude(factor: float, original_context: int) -> float:
    """The factor on cos and sin for longrope, as in transformers. `factor` is that of the context."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_context))


def rotated_dims(shape: RopeShape, fields: Fields) -> int:
    """The rotated dimensions of a head. Raises ModelFileError unless they are an even number above 0."""
    if shape.partial is None:
        return shape.head_dim
    partial = fields.number("partial_rotary_factor", shape.partial, high=1.0)
    dims = int(shape.head_dim * partial)
    if partial != 1.0 and (dims % 2 or dims < 2):
        raise fields.error(
            "partial_rotary_factor", partial, f"such that an even number of the {shape.head_dim} dimensions is rotated"
        )
    return dims


def from_fields(scaling: Fields, shape: RopeShape, outer: Fields) -> RopeSpec:
    """Reads the rotation from `rope_parameters` or `rope_scaling` (`scaling`) of a config.json (`outer`)."""
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    theta = scaling.number("rope_theta", shape.theta, low=1.0)
    frequencies, max_position = plain(rotated_dims(shape, scaling), theta), shape.max_position
    magnitude = 1.0
    if kind in ("longrope", "su"):
        return replace(_longrope(scaling, shape, outer, frequencies), theta=theta)
    if kind == "linear":
        frequencies = linear(frequencies, scaling.number("factor", low=1e-6, high=1e6))
    elif kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if low > high:
            raise scaling.error("low_freq_factor", low, f"at most high_freq_factor, which is {high:g}")
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
    elif kind == "proportional":  # the fraction of pairs that rotate, with the frequencies of a whole head
        share = scaling.number("partial_rotary_factor", 1.0, high=1.0)
        frequencies = linear(frequencies, scaling.number("factor", 1.0, low=1e-6, high=1e6))
        frequencies[int(share * shape.head_dim // 2) :] = 0
    elif kind == "dynamic" and (alpha := scaling.number("alpha", 0.0, low=-1.0, high=1e6)):
        dims = 2 * len(frequencies)
        theta *= alpha ** (dims / (dims - 2))  # NTK-aware scaling with a fixed factor (Hunyuan)
        frequencies = plain(dims, theta)
    elif kind == "dynamic":  # changes frequencies only beyond max_position, which is the longest context
        scaling.number("factor", low=1e-6, high=1e6)
    elif kind not in ("default", "mrope"):
        raise unknown_scaling(scaling.where, kind)
    axes = _mrope_axes(scaling, shape, len(frequencies))
    return RopeSpec(
        frequencies.astype(np.float32), magnitude, shape.interleaved, axes, theta=theta, scaling=dict(scaling.values)
    )


def _mrope_axes(scaling: Fields, shape: RopeShape, pairs: int) -> tuple[int, ...]:
    """`RopeSpec.axes` of the field mrope_section; empty without it."""
    is_interleaved = scaling.flag("mrope_interleaved", shape.mrope_interleaved)
    if not scaling.has("mrope_section"):
        return ()
    sections = [int(n) for n in scaling.numbers("mrope_section", 3, low=-1.0, high=float(1 << 10))]
    if not is_interleaved and sum(sections) != pairs:
        raise scaling.error("mrope_section", sections, f"three numbers with the sum {pairs}, the pairs of a head")
    return section_axes(sections, pairs, is_interleaved)


def section_axes(sections: Sequence[int], pairs: int, is_interleaved: bool) -> tuple[int, ...]:
    """`RopeSpec.axes`, (pairs,), of the numbers of pairs that time, height and width rotate.

    - `is_interleaved`: time, height and width alternate as long as height and width have pairs left (Qwen3-VL). Else
      the pairs of an axis are consecutive (Qwen2-VL).
    """
    if is_interleaved:
        return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(pairs))
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def _longrope(scaling: Fields, shape: RopeShape, outer: Fields, frequencies: np.ndarray) -> RopeSpec:
    """The rotation for contexts up to the original one; its `long` is for longer contexts."""
    name = "original_max_position_embeddings"
    absent = scaling.integer(name, shape.max_position, low=2, high=1 << 30)
    original = outer.integer(name, absent, low=2, high=1 << 30)  # Phi-3's field, before that of its scaling
    factor = scaling.number("factor", shape.max_position / original, low=1e-6, high=1e6)
    magnitude = scaling.number("attention_factor", longrope_magnitude(factor, original), high=1e3)

    def scaled(name: str) -> RopeSpec:
        """The rotation with the factors in the field `name`."""
        factors = np.asarray(scaling.numbers(name, len(frequencies), low=1e-6))
        return RopeSpec(
            longrope(frequencies, factors).astype(np.float32),
            magnitude,
            shape.interleaved,
            scaling=dict(scaling.values),
        )

    return replace(scaled("short_factor"), long=scaled("long_factor"), original_context=original)


def unknown_scaling(where: str, kind: str) -> ModelFileError:
    """Returns the error for an unknown scaling."""
    return ModelFileError(
        f"{where}: RoPE scaling {kind[:100]!r} is not known; the known ones are {', '.join(KNOWN_SCALINGS)}"
    )
