"""The definitions in numpy of the ops in `ckdist/program/ops/delta_rule.py`."""

import numpy as np

from ckdist.program.ops.delta_rule import key_heads
from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference, total
from tests.support.references.rms_norm import inverse_rms


def silu(x: np.ndarray) -> np.ndarray:
    """Returns x * sigmoid(x)."""
    return x / (1 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x)), without overflow."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


@reference("short_conv")
def short_conv(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """silu(sum over i of w[:, i] * x[t - taps + 1 + i]), with zeros before the sequence. Yang et al. 2024, figure 1."""
    results = []
    for name, x, w, declared in zip("qkv", inputs, weights, attrs["weights"], strict=True):
        taps = declared.dims[0].elements // attrs["inputs"]["qkv".index(name)].dims[-1].elements
        kernel, place = w.reshape(x.shape[1], taps), (attrs["layer"], name)  # (channels, taps)
        tail = context.states.get(place, np.zeros((taps - 1, x.shape[1]), x.dtype))
        rows = np.concatenate([tail, x])  # (taps - 1 + tokens, channels)
        context.states[place] = rows[len(rows) - taps + 1 :]
        results.append(silu(total(rows[i : i + len(x)] * kernel[:, i] for i in range(taps))))
    return results


@reference("l2_norm")
def l2_norm(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Per head: x / sqrt(sum(x^2) + eps) * scale."""
    x = inputs[0].reshape(len(inputs[0]), -1, attrs["inputs"][0].dims[-1].width)  # (tokens, heads, width)
    length = np.sqrt((x * x).sum(axis=-1, keepdims=True) + np.float32(attrs["eps"]))
    return [(x / length * np.float32(attrs["scale"])).reshape(inputs[0].shape)]


@reference("delta_gates")
def delta_gates(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The decay exp(-exp(A_log) * softplus(a + dt_bias)) and beta = sigmoid(b). Yang et al. 2024, section 3.4.

    The decay is that of Mamba 2: Dao & Gu 2024, arXiv:2405.21060. If `a` has several elements per head, each row of a
    state has its own decay: Kimi Team 2025, arXiv:2510.26692. With `decay_floor` < 0 it is exp(decay_floor *
    sigmoid(exp(A_log) * (a + dt_bias))). `beta_scale` is a factor of beta.
    """
    (a, b), (a_log, dt_bias) = inputs, weights
    rate = np.repeat(np.exp(a_log), attrs["inputs"][0].dims[-1].width)  # (elements of a,)
    floor, beta = np.float32(attrs.get("decay_floor", 0.0)), np.float32(attrs.get("beta_scale", 1.0)) / (1 + np.exp(-b))
    if floor < 0:
        return [np.exp(floor / (1 + np.exp(-rate * (a + dt_bias)))), beta]
    return [np.exp(-rate * softplus(a + dt_bias)), beta]


@reference("delta_rule")
def delta_rule(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Per head and token: S = decay S; S = S + k beta (v - k S); o = q S. Yang et al. 2024, equation 10."""
    q, k, v, decay, beta = inputs
    key_dim, value_dim = attrs["inputs"][0].dims[-1], attrs["inputs"][2].dims[-1]
    of = key_heads(key_dim, value_dim, attrs["tiled"], context.mesh)
    q, k = (x.reshape(len(x), -1, key_dim.width)[:, of] for x in (q, k))  # (tokens, heads, key_dim)
    values = v.reshape(len(v), -1, value_dim.width)  # (tokens, heads, value_dim)
    place = (attrs["layer"], "recurrent")
    state = context.states.get(place, np.zeros((len(of), key_dim.width, value_dim.width), v.dtype))
    out = np.zeros_like(values)
    for t in range(len(v)):
        state = state * decay[t].reshape(len(of), attrs["inputs"][3].dims[-1].width, 1)
        delta = beta[t][:, None] * (values[t] - np.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t][:, :, None] * delta[:, None]
        out[t] = np.einsum("hk,hkv->hv", q[t], state)
    context.states[place] = state
    return [out.reshape(v.shape)]


@reference("gated_norm")
def gated_norm(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Per head: rms_norm(x) * w * function(gate), where the function is silu or sigmoid."""
    (x, gate), (w,) = inputs, weights
    heads = x.reshape(-1, w.shape[-1])  # (tokens * heads, value_dim)
    factor = silu(gate) if attrs["function"] == "silu" else 1 / (1 + np.exp(-gate))
    return [(heads * inverse_rms(heads, attrs["eps"]) * w).reshape(x.shape) * factor]
