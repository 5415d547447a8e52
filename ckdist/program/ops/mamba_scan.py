"""Mamba-2 (Dao & Gu 2024, arXiv:2405.21060) for inference: convolutions, the states of heads, norms over groups.

And Mamba-1 (Gu & Dao 2023, arXiv:2312.00752): the inputs that channels share, and their states. The state of a sequence
is in `RankContext.states`, or in the executor's state slots.
"""

from dataclasses import replace

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.cache import CacheArray, LayerCache, state_cache
from ckdist.program.ops.delta_rule import NEUTRAL, key_heads, silu, softplus
from ckdist.program.ops.elementwise import GATES
from ckdist.program.ops.op import ServingLowering, TrainingLowering, lower, op, same, total, unsharded, vjp
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Group, Inferred, RankContext, Values, Weights
from ckdist.program.ops.rms_norm import inverse_rms, lower_rms_norm, norm_gradients
from ckdist.program.program import Instr, Value
from ckdist.program.step import ABSENT, VectorIndex

PARTS = ("c", "b", "x")  # queries, keys and values of linear attention


def infer_mamba2(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x. Raises LayoutError if heads, groups and kernels do not fit together."""
    c, b, x, z, dt = inputs
    same("mamba2", c, b)
    same("mamba2", x, z)
    heads, groups = x.dims[-1], c.dims[-1]
    if dt.dims[-1] != replace(heads, width=1) or heads.count % groups.count or heads.axis != groups.axis:
        raise LayoutError(f"mamba2: heads [{heads}], groups [{groups}] and steps [{dt.dims[-1]}] do not fit")
    for value, w in zip((c, b, x), weights, strict=False):
        if replace(w.dims[0], width=value.dims[-1].width) != value.dims[-1] or w.dims[0].width % value.dims[-1].width:
            raise LayoutError(f"mamba2 of [{value.dims[-1]}] has a kernel of [{w.dims[0]}]: {w}")
    return [(x.dims, None)]


@op("mamba2", infer_mamba2)
def mamba2(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Per head and token: S = exp(-exp(A_log) dt) S + b dt x; y = c S + D x; y * silu(z).

    c, b and x are first convolved over the tokens of the sequence, plus a bias, through SiLU.
    dt = clip(softplus(dt + dt_bias)). Inputs are multiplied by attrs["scales"].
    """
    scales = dict(zip(("z", "x", "b", "c", "dt"), map(np.float32, attrs["scales"]), strict=True))
    kernels, (a_log, d, dt_bias), biases = weights[:3], weights[3:6], weights[6:]
    parts = {}
    for i, (name, rows) in enumerate(zip(PARTS, inputs, strict=False)):
        taps = attrs["weights"][i].dims[0].width // attrs["inputs"][i].dims[-1].width
        kernel = kernels[i].reshape(rows.shape[1], taps)
        seen = context.with_last(attrs["layer"], name, rows, taps - 1)
        made = total(scales[name] * seen[t : t + len(rows)] * kernel[:, t] for t in range(taps))
        parts[name] = silu(made + biases[i] if biases else made)
    groups, heads = attrs["inputs"][0].dims[-1], attrs["inputs"][2].dims[-1]
    of = key_heads(groups, heads, False, context.mesh)
    c, b = (parts[n].reshape(len(parts[n]), parts[n].shape[1] // groups.width, groups.width)[:, of] for n in "cb")
    x = parts["x"].reshape(len(inputs[2]), len(of), heads.width)  # (tokens, heads, head_dim)
    dt = np.clip(softplus(inputs[4] * scales["dt"] + dt_bias), *map(np.float32, attrs["limits"]))
    decay, place = np.exp(-np.exp(a_log) * dt), (attrs["layer"], "recurrent")
    state = context.states.get(place, np.zeros((len(of), groups.width, heads.width), x.dtype))
    out = np.zeros_like(x)
    for t in range(len(x)):
        state = state * decay[t][:, None, None] + b[t][:, :, None] * (dt[t][:, None] * x[t])[:, None]
        out[t] = np.einsum("hk,hkv->hv", c[t], state) + d[:, None] * x[t]
    context.states[place] = state
    return [out.reshape(inputs[2].shape) * silu(inputs[3] * scales["z"])]


@lower("mamba2", "inference")
def lower_mamba2(lowering: ServingLowering, group: Group) -> None:
    """Emits the step of linear attention, without corrections by keys."""
    instr, attrs, (out,) = group.instr, group.instr.attrs, group.instr.outputs
    operands = dict(zip("qkvza", map(lowering.place_of, instr.inputs), strict=True))
    place, exchanged = lowering.head_results(out)
    weights = "conv_q", "conv_k", "conv_v", "a_log", "skip", "dt_bias", "bias_q", "bias_k", "bias_v"
    scales = "gate_scale", "v_scale", "k_scale", "q_scale", "dt_scale"
    own = {
        **operands,
        "b": operands["a"],  # not read
        "out": place,
        **dict(zip(weights, map(lowering.vector, instr.weights), strict=False)),
        **dict(zip(scales, attrs["scales"], strict=True)),
        "layer": attrs["layer"],
        "exchanged": exchanged,
        "corrects": False,
        "by_row": False,
        "gate": GATES["silu"],
        "dt_low": attrs["limits"][0],
        "dt_high": attrs["limits"][1],
    }
    lowering.emit("delta_rule", **{**NEUTRAL, **own})
    heads, groups = out.dims[-1], instr.inputs[0].dims[-1]
    taps = instr.weight(2).dims[0].width // heads.width
    of = tuple(key_heads(groups, heads, False, lowering.mesh))
    states, cache = state_cache(groups, heads, taps, of), lowering.caches.get(attrs["layer"])
    if cache is not None:  # attention in the same layer
        states = replace(cache, arrays=(*cache.arrays, *states.arrays), key_head_of=of)
    lowering.caches[attrs["layer"]] = states


def infer_head_squares(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """One number for each head. Partial if heads are sharded."""
    (x,) = inputs
    heads = x.dims[-1]
    return [((x.dims[0], replace(heads, name="squares", width=1, axis=None, unit=1)), heads.axis)]


@op("head_squares", infer_head_squares)
def head_squares(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The sum of squares of each head; 0 for heads of other ranks."""
    dim = attrs["inputs"][0].dims[-1]
    begin, end = context.share(dim)
    out = np.zeros((len(inputs[0]), dim.count), inputs[0].dtype)
    out[:, begin:end] = (inputs[0] ** 2).reshape(len(out), end - begin, dim.width).sum(axis=-1)
    return [out]


@lower("head_squares", "inference")
def lower_head_squares(lowering: ServingLowering, group: Group) -> None:
    (x,), (out,) = group.instr.inputs, group.instr.outputs
    heads = x.dims[-1]
    place, first = lowering.result(out), heads.share(lowering.mesh)[0]
    sizes = {"heads": heads.count, "first_head": first, "head_width": heads.width}
    lowering.emit("head_squares", x=lowering.place_of(x), out=place, **sizes)


def infer_group_norm(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x. Raises LayoutError if heads are sharded and there are no sums of squares."""
    x, *squares = inputs
    if weights[0].dims[-1] != x.dims[-1] or x.dims[-1].count % attrs["groups"]:
        raise LayoutError(f"group_norm of [{x.dims[-1]}] in {attrs['groups']} groups has a weight of {weights[0]}")
    if x.dims[-1].axis and not squares:
        raise LayoutError(f"group_norm of sharded heads [{x.dims[-1]}] needs the sums of squares")
    return [(x.dims, None)]


@op("group_norm", infer_group_norm)
def group_norm(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns x / sqrt(mean over the group of x^2 + eps) * w, for groups of consecutive heads."""
    dim, (w,) = attrs["inputs"][0].dims[-1], weights
    begin, end = context.share(dim)
    x = inputs[0].reshape(len(inputs[0]), end - begin, dim.width)
    squares = inputs[1] if len(inputs) > 1 else (x * x).sum(axis=-1)  # (tokens, all heads)
    group = dim.count // attrs["groups"]
    mean = squares.reshape(len(x), attrs["groups"], group).sum(axis=-1) / np.float32(group * dim.width)
    by = np.repeat(1 / np.sqrt(mean + np.float32(attrs["eps"])), group, axis=1)[:, begin:end]
    return [(x * by[:, :, None]).reshape(inputs[0].shape) * w]


@vjp("group_norm")
def group_norm_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction for the gradients of x and of the weight. Raises LayoutError if heads are sharded."""
    if len(instr.inputs) > 1:
        raise LayoutError(f"group_norm of sharded heads [{instr.inputs[0].dims[-1]}] has no gradient")
    return norm_gradients(g, instr, grads[0], wanted[1], "d_norm")


@lower("group_norm", "training")
def lower_group_norm_rows(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits the step of a norm whose weight is for all groups."""
    lower_rms_norm(lowering, instr)


@lower("group_norm", "inference")
def lower_group_norm(lowering: ServingLowering, group: Group) -> None:
    """Emits one step. If ranks have exchanged heads for tokens, it reads each rank's heads in that rank's slot."""
    instr, (out,) = group.instr, group.instr.outputs
    x, *squares = instr.inputs
    heads, exchange = x.dims[-1], lowering.graph.maker(x, "all_to_all")
    dim = exchange.inputs[0].dims[-1] if exchange else heads
    ends = [dim.share(mesh)[1] for mesh in lowering.peers] if exchange else []
    weight = instr.weight(0)
    norm = lowering.shard_vectors(weight, lowering.pieces(heads)) if exchange else lowering.vector(weight)
    place = lowering.buffer("arena", heads.local(lowering.mesh), rows=lowering.most_rows(out), selected=out.selected)
    lowering.at[out.name] = place
    lowering.emit(
        "group_norm",
        x=lowering.place_of(x),
        squares=lowering.place_of(squares[0] if squares else None),
        norm=norm,
        out=place,
        heads=heads.count,
        first_head=heads.share(lowering.mesh)[0],
        head_width=heads.width,
        groups=instr.attrs["groups"],
        parts=len(ends),
        ends=ends,
        eps=instr.attrs["eps"],
    )


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
