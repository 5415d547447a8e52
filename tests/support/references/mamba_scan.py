"""The definitions in numpy of the ops in `ckdist/program/ops/mamba_scan.py`."""

import numpy as np

from ckdist.program.ops.delta_rule import key_heads
from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference, total
from tests.support.references.delta_rule import silu, softplus

PARTS = ("c", "b", "x")  # queries, keys and values of linear attention


@reference("mamba2")
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
        kernel, place = kernels[i].reshape(rows.shape[1], taps), (attrs["layer"], name)
        tail = context.states.get(place, np.zeros((taps - 1, rows.shape[1]), rows.dtype))
        seen = np.concatenate([tail, rows])
        context.states[place] = seen[len(seen) - taps + 1 :]
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


@reference("head_squares")
def head_squares(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The sum of squares of each head; 0 for heads of other ranks."""
    dim = attrs["inputs"][0].dims[-1]
    begin, end = context.share(dim)
    out = np.zeros((len(inputs[0]), dim.count), inputs[0].dtype)
    out[:, begin:end] = (inputs[0] ** 2).reshape(len(out), end - begin, dim.width).sum(axis=-1)
    return [out]


@reference("group_norm")
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
