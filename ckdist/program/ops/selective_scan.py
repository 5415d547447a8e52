"""Mamba-1 (Gu & Dao 2023, arXiv:2312.00752) for inference: the inputs that channels share, and their states.

The state of a sequence is in `RankContext.states`, or in the executor's state slots.
"""

from dataclasses import replace

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.cache import CacheArray, LayerCache
from ckdist.program.ops.delta_rule import silu, softplus
from ckdist.program.ops.op import ServingLowering, lower, op, same, unsharded
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, RankContext, Values, Weights
from ckdist.program.ops.rms_norm import inverse_rms
from ckdist.program.step import ABSENT, VectorIndex


def infer_scan_inputs(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The low rank of the steps of time, then b and c. Raises LayoutError if these do not fit together."""
    (x,), low, pairs = inputs, attrs["low"], attrs["pairs"]
    unsharded("scan_inputs", x)
    if x.dims[0].axis or low.elements + pairs.elements != x.dims[-1].elements or pairs.elements % 2:
        raise LayoutError(f"scan_inputs of [{x.dims[-1]}] cannot make [{low}] and [{pairs}]")
    return [((x.dims[0], low), None), ((x.dims[0], pairs), None)]


@op("scan_inputs", infer_scan_inputs)
def scan_inputs(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The parts of x: the low rank; b and c side by side. With attrs["eps"] each is normed, with weights if given."""
    rank, state, eps = attrs["low"].elements, attrs["pairs"].elements // 2, attrs["eps"]
    parts = np.split(inputs[0], [rank, rank + state], axis=1)
    if eps:
        by = weights or [np.float32(1)] * 3
        parts = [y * inverse_rms(y, eps) * w for y, w in zip(parts, by, strict=True)]
    return [parts[0], np.concatenate(parts[1:], axis=1)]


@lower("scan_inputs", "inference")
def lower_scan_inputs(lowering: ServingLowering, group: Group) -> None:
    """Emits one step, which adds the summands of all ranks."""
    instr = group.instr
    x, places = lowering.place_of(instr.inputs[0]), lowering.results(instr.outputs)
    norms = [lowering.vector(w) for w in instr.weights] or [VectorIndex(ABSENT)] * 3
    names = dict(zip(("low_norm", "b_norm", "c_norm"), norms, strict=True))
    lowering.emit("scan_inputs", x=x, low=places[0], bc=places[1], **names, eps=instr.attrs["eps"])


def infer_selective_scan(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x. Raises LayoutError if channels and rows of states do not fit together."""
    x, z, dt, bc = inputs
    same("selective_scan", x, z)
    same("selective_scan", x, dt)
    unsharded("selective_scan", bc)
    a = weights[0].dims[0]
    if replace(a, width=x.dims[-1].width) != x.dims[-1] or 2 * a.width != bc.dims[-1].elements * x.dims[-1].width:
        raise LayoutError(f"selective_scan of [{x.dims[-1]}] and [{bc.dims[-1]}] has states of [{a}]")
    return [(x.dims, None)]


@op("selective_scan", infer_selective_scan)
def selective_scan(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Per channel and token: S = exp(-exp(A_log) d) S + b d x; y = (c S + D x) silu(z); d = softplus(dt + dt_bias)."""
    (x, z, dt, bc), (a_log, d, dt_bias) = inputs, weights
    b, c = np.split(bc, 2, axis=1)  # (tokens, rows)
    dt = softplus(dt + dt_bias)  # (tokens, channels)
    a = -np.exp(a_log.reshape(x.shape[1], b.shape[1]))  # (channels, rows)
    place = (attrs["layer"], "recurrent")
    state = context.states.get(place, np.zeros(a.shape, x.dtype))
    out = np.zeros_like(x)
    for t in range(len(x)):
        state = np.exp(a * dt[t][:, None]) * state + b[t] * (dt[t] * x[t])[:, None]
        out[t] = state @ c[t] + d * x[t]
    context.states[place] = state
    return [out * silu(z)]


@lower("selective_scan", "inference")
def lower_selective_scan(lowering: ServingLowering, group: Group) -> None:
    """Emits one step. The layer's cache has the convolution's inputs already."""
    instr, layer, (out,) = group.instr, group.instr.attrs["layer"], group.instr.outputs
    inputs = dict(zip(("x", "z", "dt", "bc"), map(lowering.place_of, instr.inputs), strict=True))
    vectors = dict(zip(("a_log", "skip", "dt_bias"), map(lowering.vector, instr.weights), strict=True))
    lowering.emit("selective_scan", **inputs, out=lowering.result(out), **vectors, layer=layer)
    (tail,) = lowering.caches[layer].arrays
    state = CacheArray("state", tail.heads, tail.width, instr.inputs[3].dims[-1].elements // 2, "sequence")
    lowering.caches[layer] = LayerCache((state, tail))
