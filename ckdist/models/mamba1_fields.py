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
    f = header.fields
    return Mamba1(
        f.integer("ssm.inner_size", high=limits.MAX_WIDTH),
        f.integer("ssm.state_size", high=limits.MAX_HEAD_DIM),
        f.integer("ssm.time_step_rank", high=limits.MAX_WIDTH),
        f.integer("ssm.conv_kernel", low=2, high=limits.MAX_CONV),
        header.has_any(".ssm_conv1d.bias"),
        header.has_any(".ssm_in.bias"),
        norms,
        UNIT_EPS if norms == "unit" else 0.0,
    )


def metadata(spec: ModelSpec, where: str) -> dict[str, Any]:
    """The GGUF metadata of the mixers. Raises ArchitectureError for a mixer that GGUF's readers do not compute."""
    mamba = next(iter(spec.mixers(Mamba1)), None)
    reasons = {"without Mamba layers": mamba is None} if mamba is None else {
        "with biases of projections": mamba.bias,
        "without biases of convolutions": not mamba.conv_bias,
        f"with {mamba.channels} channels of Mamba": mamba.channels != 2 * spec.hidden_size,
        "with another epsilon inside the mixer": mamba.norm_eps not in (0.0, UNIT_EPS),
    }  # fmt: skip
    for why in (reason for reason, holds in reasons.items() if holds):
        raise ArchitectureError(f"{where}: {spec.family} {why} has no GGUF form: its readers have none")
    assert mamba is not None
    return {
        "ssm.conv_kernel": mamba.conv_kernel,
        "ssm.inner_size": mamba.channels,
        "ssm.state_size": mamba.state_dim,
        "ssm.time_step_rank": mamba.dt_rank,
    }


def gguf_values(spec: ModelSpec, weight: str, values: np.ndarray) -> np.ndarray:
    """Converts the values of a weight for GGUF: -exp(A_log), and a row per channel."""
    if weight.endswith((".mamba.A_log", ".mamba.conv1d.weight")):
        channels = spec.mixers(Mamba1)[0].channels
        return (-np.exp(values) if weight.endswith("A_log") else values).reshape(channels, -1)
    return values
