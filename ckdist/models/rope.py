"""Reads rotary position embeddings: their inverse frequencies, and the axes of their positions."""

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


def unscaled(dims: int, theta: float, interleaved: bool = False) -> RopeSpec:
    """The rotation of `dims` dimensions without scaling."""
    return RopeSpec(plain(dims, theta).astype(np.float32), interleaved=interleaved, theta=theta)


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
    kind = scaling.text("rope_type", scaling.text("type", "default")).removeprefix("deepseek_")  # another name of yarn
    theta = scaling.number("rope_theta", shape.theta, low=1.0)
    rotation = RopeSpec(plain(rotated_dims(shape, scaling), theta), 1.0, shape.interleaved, theta=theta)
    if kind not in ("default", "mrope"):
        from ckdist.models import rope_scaling  # many models have none

        if kind in ("longrope", "su"):
            return rope_scaling.longrope_rotation(scaling, shape, outer, rotation)
        rotation = rope_scaling.scaled(rotation, kind, scaling, shape)
    return replace(
        rotation,
        inverse_frequencies=rotation.inverse_frequencies.astype(np.float32),
        axes=_mrope_axes(scaling, shape, rotation.dims // 2),
        scaling=dict(scaling.values),
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


def unknown_scaling(where: str, kind: str) -> ModelFileError:
    """Returns the error for an unknown scaling."""
    return ModelFileError(
        f"{where}: RoPE scaling {kind[:100]!r} is not known; the known ones are {', '.join(KNOWN_SCALINGS)}"
    )
