"""Mamba-1 in files: GGUF metadata, names and values of tensors."""

from typing import Any

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.models import limits
from ckdist.models.families.family import Form, GgufHeader, Target
from ckdist.models.fields import Fields
from ckdist.models.spec import ModelSpec
from ckdist.models.state_mixers import Mamba1

TENSORS: dict[str, Target] = {  # stored name of a part of the mixer -> weights
    "in_proj": ("mamba.in_proj_x", "mamba.in_proj_z"),
    **{name: f"mamba.{name}" for name in ("A_log", "D", "conv1d", "dt_proj", "out_proj", "x_proj")},
    **{f"{part}_layernorm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
}
GGUF: dict[str, Target] = {
    "ssm_in": TENSORS["in_proj"],
    "ssm_x": "mamba.x_proj",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt": "mamba.dt_proj",
    "ssm_out": "mamba.out_proj",
    "ssm_conv1d": "mamba.conv1d",
    **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
}
UNIT_EPS = 1e-6  # of Falcon Mamba's norms inside the mixer, which GGUF does not have
GGUF_FORM: tuple[str, Form] = (r".*\.A_log", "minus_exp")


def dt_rank(f: Fields, name: str, hidden_size: int) -> int:
    """Reads the low rank of the steps of time; "auto": hidden_size / 16, rounded up."""
    auto = f.raw(name) in (None, "auto")
    return -(-hidden_size // 16) if auto else f.integer(name, high=limits.MAX_WIDTH)


def from_gguf(header: GgufHeader, norms: str) -> Mamba1:
    """Reads GGUF metadata. It has biases if there are tensors for them."""
    f, has = header.fields, lambda part: any(name.endswith(part) for name in header.dims)
    return Mamba1(
        f.integer("ssm.inner_size", high=limits.MAX_WIDTH),
        f.integer("ssm.state_size", high=limits.MAX_HEAD_DIM),
        f.integer("ssm.time_step_rank", high=limits.MAX_WIDTH),
        f.integer("ssm.conv_kernel", low=2, high=limits.MAX_CONV),
        has(".ssm_conv1d.bias"),
        has(".ssm_in.bias"),
        norms,
        UNIT_EPS if norms == "unit" else 0.0,
    )


def metadata(spec: ModelSpec, where: str) -> dict[str, Any]:
    """The GGUF metadata of the mixers. Raises ArchitectureError for a mixer that GGUF's readers do not compute."""
    mamba = next((layer.mixer for layer in spec.layers if isinstance(layer.mixer, Mamba1)), None)
    why = (
        "without Mamba layers"
        if mamba is None
        else "with biases of projections"
        if mamba.bias
        else "without biases of convolutions"
        if not mamba.conv_bias
        else f"with {mamba.channels} channels of Mamba"
        if mamba.channels != 2 * spec.hidden_size
        else "with another epsilon inside the mixer"
        if mamba.norm_eps not in (0.0, UNIT_EPS)
        else ""
    )
    if mamba is None or why:
        raise ArchitectureError(f"{where}: {spec.family} {why} has no GGUF form: its readers have none")
    return {
        "ssm.conv_kernel": mamba.conv_kernel,
        "ssm.inner_size": mamba.channels,
        "ssm.state_size": mamba.state_dim,
        "ssm.time_step_rank": mamba.dt_rank,
    }


def gguf_values(spec: ModelSpec, weight: str, values: np.ndarray) -> np.ndarray:
    """Converts the values of a weight for GGUF: -exp(A_log), and a row per channel."""
    if weight.endswith((".mamba.A_log", ".mamba.conv1d.weight")):
        mamba = next(layer.mixer for layer in spec.layers if isinstance(layer.mixer, Mamba1))
        return (-np.exp(values) if weight.endswith("A_log") else values).reshape(mamba.channels, -1)
    return values
