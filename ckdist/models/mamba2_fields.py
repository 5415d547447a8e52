"""Mamba-2 in files: fields of config.json, GGUF metadata, names and values of tensors."""

import math
from typing import Any

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.models import limits
from ckdist.models.families.family import Form, GgufHeader, Target
from ckdist.models.fields import Fields
from ckdist.models.from_config import Sizes
from ckdist.models.spec import ModelSpec
from ckdist.models.state_mixers import Mamba2

DEFAULTS = {  # of transformers' classes whose fields begin with mamba_
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": "auto", "mamba_d_state": 256, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False,
}  # fmt: skip
MAMBA, FULL = ("mamba", "linear_attention"), ("attention", "full_attention")  # names in published and in newer files
IN_PROJ = tuple(f"mamba.in_proj_{part}" for part in ("z", "x", "b", "c", "dt"))
CONV1D = tuple(f"mamba.conv1d_{part}" for part in ("x", "b", "c"))
SAFETENSORS: dict[str, Target] = {"mamba.in_proj": IN_PROJ, "mamba.conv1d": CONV1D}  # parts of a layer
GGUF: dict[str, Target] = {
    "ssm_in": IN_PROJ,
    "ssm_conv1d": CONV1D,
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
GGUF_FORM: tuple[str, Form] = (r".*\.A_log", "minus_exp")


def dt_limits(f: Fields) -> tuple[float, float]:
    """Reads `time_step_limit`. The upper limit is usually infinite, in several spellings."""
    value = f.raw("time_step_limit")
    if value is None:
        return 0.0, math.inf
    spelled = lambda one: one.get("__float__", "") if isinstance(one, dict) else one
    plain = [spelled(one) for one in value] if isinstance(value, list) else []
    try:
        low, high = (float(one) for one in plain)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not 0 <= low < high:
        raise f.error("time_step_limit", value, "two numbers, 0 <= the first < the second")
    return low, high


def read(f: Fields, n: Sizes, **more: Any) -> Mamba2:
    """Reads a config.json whose fields begin with mamba_. `more` are further fields of Mamba2."""
    heads = f.integer("mamba_n_heads", high=limits.MAX_HEADS)
    inner = f.integer("mamba_d_ssm", 0, high=limits.MAX_WIDTH) or n.hidden_size * f.integer("mamba_expand", high=64)
    auto = f.raw("mamba_d_head") == "auto"
    width = inner // heads if auto else f.integer("mamba_d_head", high=limits.MAX_HEAD_DIM)
    if heads * width != inner:
        raise f.error("mamba_n_heads", heads, f"{inner} / mamba_d_head ({width})")
    groups = f.integer("mamba_n_groups", high=limits.MAX_HEADS)
    return Mamba2(
        heads,
        width,
        groups,
        f.integer("mamba_d_state", high=limits.MAX_HEAD_DIM),
        f.integer("mamba_d_conv", low=2, high=limits.MAX_CONV),
        f.flag("mamba_conv_bias"),
        f.flag("mamba_proj_bias"),
        dt_limits=dt_limits(f),
        **{"norm_groups": groups, **more},
    )


def from_gguf(header: GgufHeader, **more: Any) -> Mamba2:
    """Reads GGUF metadata. It has biases if there are tensors for them. `more` are further fields of Mamba2."""
    f = header.fields
    heads = f.integer("ssm.time_step_rank", high=limits.MAX_HEADS)
    inner = f.integer("ssm.inner_size", high=limits.MAX_WIDTH)
    if inner % heads:
        raise f.error("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank, {heads}")
    groups = f.integer("ssm.group_count", high=limits.MAX_HEADS)
    return Mamba2(
        heads,
        inner // heads,
        groups,
        f.integer("ssm.state_size", high=limits.MAX_HEAD_DIM),
        f.integer("ssm.conv_kernel", low=2, high=limits.MAX_CONV),
        header.has_any(".ssm_conv1d.bias"),
        header.has_any(".ssm_in.bias"),
        **{"norm_groups": groups, **more},
    )


def metadata(spec: ModelSpec, where: str) -> dict[str, Any]:
    """The GGUF metadata of the mixers. Raises ArchitectureError for a mixer that GGUF cannot describe."""
    if not spec.mixers(Mamba2):
        raise ArchitectureError(f"{where}: {spec.family} without Mamba layers has no GGUF form of this name")
    mamba = spec.mixers(Mamba2)[0]
    if mamba.dt_limits != (0.0, math.inf) or mamba.bias:
        what = "mamba_proj_bias true" if mamba.bias else f"time_step_limit {list(mamba.dt_limits)}"
        raise ArchitectureError(f"{where}: {spec.family} with {what} has no GGUF form: its readers have none")
    return {
        "attention.head_count_kv": spec.kv_heads,
        "ssm.conv_kernel": mamba.conv_kernel,
        "ssm.group_count": mamba.num_groups,
        "ssm.inner_size": mamba.num_heads * mamba.head_dim,
        "ssm.state_size": mamba.state_dim,
        "ssm.time_step_rank": mamba.num_heads,
    }


def gguf_values(spec: ModelSpec, weight: str, values: np.ndarray) -> np.ndarray:
    """Converts the values of a weight for GGUF: -exp(A_log), and its shapes of vectors."""
    name = weight.split(".", 3)[-1]
    if not name.startswith("mamba."):
        return values
    mamba = spec.mixers(Mamba2)[0]
    if name in ("mamba.A_log", "mamba.D"):
        return (-np.exp(values) if name == "mamba.A_log" else values).reshape(-1, 1)
    if name == "mamba.norm.weight":
        return values.reshape(mamba.num_groups, -1)
    return values.reshape(-1, mamba.conv_kernel) if ".conv1d_" in name and name.endswith("weight") else values
