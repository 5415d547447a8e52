"""The definitions in numpy of the ops in `ckdist/program/ops/elementwise.py`."""

import math

import numpy as np

from ckdist.program.ops.elementwise import SWIGLU_ALPHA, SWIGLU_LIMIT
from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference

# sqrt(2 / pi) and the factor of the cube in the tanh form of GELU
GELU_SCALE, GELU_CUBIC = 0.7978845608028654, 0.044715


@reference("scale")
def scale(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns x * factor."""
    return [inputs[0] * np.float32(attrs["factor"])]


@reference("scale_queries")
def scale_queries(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Multiplies each row by 1 + beta * log(1 + floor((position + from_one) / context))."""
    far = np.log1p(((context.positions + attrs["from_one"]) // attrs["context"]).astype(np.float32))
    return [inputs[0] * (1 + np.float32(attrs["beta"]) * far)[:, None]]


@reference("soft_cap")
def soft_cap(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns cap * tanh(x / cap). Gemma 2, arXiv:2408.00118, section 2."""
    cap = np.float32(attrs["cap"])
    return [cap * np.tanh(inputs[0] / cap)]


@reference("activate")
def activate(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """f(x). The step of the linear that makes x computes it."""
    return [_function(inputs[0], attrs["function"])]


def _function(x: np.ndarray, name: str) -> np.ndarray:
    """ReLU (squared), SiLU, sigmoid, softplus, tanh, GELU or its tanh form (Hendrycks & Gimpel, arXiv:1606.08415)."""
    if name == "relu2":
        return np.maximum(x, 0) ** 2
    if name == "softplus":
        return np.logaddexp(x, np.float32(0))
    if name in ("tanh", "relu"):
        return np.tanh(x) if name == "tanh" else np.maximum(x, 0)
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "sigmoid":
        return 1 / (1 + np.exp(-x))
    if name == "gelu":
        return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[x.dtype])(x / np.sqrt(np.float32(2))))
    return 0.5 * x * (1 + np.tanh(np.float32(GELU_SCALE) * (x + np.float32(GELU_CUBIC) * x**3)))


@reference("gated")
def gated(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """f(gate) * up, with f SiLU, GELU, GELU in its tanh form, sigmoid or softplus. Shazeer 2020, arXiv:2002.05202.

    With a `limit`: min(silu(gate), limit) * clamp(up, -limit, limit).
    clamped_swiglu: g * sigmoid(1.702 g) * (u + 1), with g = min(gate, 7) and u = clamp(up, -7, 7). OpenAI 2025,
    arXiv:2508.10925.
    """
    gate, up = inputs
    if attrs["function"] == "clamped_swiglu":
        g, u = np.minimum(gate, np.float32(SWIGLU_LIMIT)), np.clip(up, np.float32(-SWIGLU_LIMIT), SWIGLU_LIMIT)
        return [g / (1 + np.exp(np.float32(-SWIGLU_ALPHA) * g)) * (u + 1)]
    if attrs["function"] == "clamped_silu":  # limits of 10, as in kernels/isa/gate.h
        g = np.minimum(gate, np.float32(10))
        return [g / (1 + np.exp(-g)) * np.clip(up, np.float32(-10), np.float32(10))]
    if limit := attrs.get("limit", 0.0):
        return [np.minimum(_function(gate, "silu"), np.float32(limit)) * np.clip(up, -limit, limit).astype(up.dtype)]
    return [_function(gate * np.float32(attrs.get("gate_scale", 1.0)), attrs["function"]) * up]


@reference("add")
def add(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The sum. If both operands are partial over an axis, so is the sum."""
    return [inputs[0] + inputs[1]]


@reference("select_rows")
def select_rows(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The rows whose logits are needed. If tokens are sharded, only those of this rank."""
    return [inputs[0][context.logits_indices]]
