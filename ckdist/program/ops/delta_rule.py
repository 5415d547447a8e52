"""Linear attention by the gated delta rule, for inference: short convolutions, gates, norms, and the states of heads.

One step computes all of them. The state of a sequence is in `RankContext.states`, or in the executor's state slots.
"""

from dataclasses import replace

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.mesh import Mesh
from ckdist.program.cache import state_cache
from ckdist.program.ops.elementwise import GATES
from ckdist.program.ops.op import ServingLowering, alike, lower, op, total, unchanged
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, RankContext, Values, Weights
from ckdist.program.ops.rms_norm import inverse_rms
from ckdist.program.step import ABSENT, VectorIndex


def silu(x: np.ndarray) -> np.ndarray:
    """Returns x * sigmoid(x)."""
    return x / (1 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x)), without overflow."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def infer_short_conv(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the inputs. Raises LayoutError if a kernel has other channels."""
    for x, w in zip(inputs, weights, strict=True):
        if replace(w.dims[0], width=x.dims[-1].width) != x.dims[-1] or w.dims[0].width % x.dims[-1].width:
            raise LayoutError(f"short_conv of [{x.dims[-1]}] has a kernel of [{w.dims[0]}]: {w}")
    return [(x.dims, None) for x in inputs]


@op("short_conv", infer_short_conv)
def short_conv(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """silu(sum over i of w[:, i] * x[t - taps + 1 + i]), with zeros before the sequence. Yang et al. 2024, figure 1."""
    results = []
    for name, x, w, declared in zip("qkv", inputs, weights, attrs["weights"], strict=True):
        taps = declared.dims[0].elements // attrs["inputs"]["qkv".index(name)].dims[-1].elements
        kernel = w.reshape(x.shape[1], taps)  # (channels, taps)
        rows = context.with_last(attrs["layer"], name, x, taps - 1)  # (taps - 1 + tokens, channels)
        results.append(silu(total(rows[i : i + len(x)] * kernel[:, i] for i in range(taps))))
    return results


@op("l2_norm", unchanged)
def l2_norm(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Per head: x / sqrt(sum(x^2) + eps) * scale."""
    x = inputs[0].reshape(len(inputs[0]), -1, attrs["inputs"][0].dims[-1].width)  # (tokens, heads, width)
    length = np.sqrt((x * x).sum(axis=-1, keepdims=True) + np.float32(attrs["eps"]))
    return [(x / length * np.float32(attrs["scale"])).reshape(inputs[0].shape)]


def infer_delta_gates(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the inputs. Raises LayoutError if a weight has other heads."""
    a, b, (a_log, dt_bias) = inputs[0].dims[-1], inputs[1].dims[-1], (w.dims[0] for w in weights)
    if dt_bias != a or a_log != b or replace(a, width=1) != b:
        raise LayoutError(f"delta_gates of [{a}] and [{b}] has weights of [{dt_bias}] and [{a_log}]")
    return [(value.dims, None) for value in inputs]


@op("delta_gates", infer_delta_gates)
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


def infer_delta_rule(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the values. Raises LayoutError if the heads do not fit together."""
    q, k, v, decay, beta = inputs
    keys, values = q.dims[-1], v.dims[-1]
    factors = decay.dims[-1].width  # of a state: one, or one for each of its rows
    gates = replace(values, width=factors), replace(values, width=1)
    if k.dims != q.dims or (decay.dims[-1], beta.dims[-1]) != gates or factors not in (1, keys.width):
        raise LayoutError(f"delta_rule: keys [{k.dims[-1]}], values [{values}], gates [{decay.dims[-1]}] do not fit")
    if values.count % keys.count:
        raise LayoutError(f"delta_rule: {values.count} value heads are not a multiple of {keys.count} key heads")
    if keys.axis != values.axis and not (attrs["tiled"] and keys.axis is None):
        raise LayoutError(f"delta_rule: value heads are sharded over {values.axis}, key heads over {keys.axis}")
    return [(v.dims, None)]


def key_heads(keys: Dim, values: Dim, tiled: bool, mesh: Mesh) -> list[int]:
    """For each value head of this rank: the local key head that it reads."""
    group, first = values.count // keys.count, keys.share(mesh)[0]
    return [(head % keys.count if tiled else head // group) - first for head in range(*values.share(mesh))]


@op("delta_rule", infer_delta_rule)
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


def infer_gated_norm(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x. Raises LayoutError if the weight does not have the size of one head."""
    if weights[0].dims[-1].elements != inputs[0].dims[-1].width:
        raise LayoutError(f"gated_norm of heads of {inputs[0].dims[-1].width} has another weight: {weights[0]}")
    return alike("gated_norm")(inputs, weights, attrs)


@op("gated_norm", infer_gated_norm)
def gated_norm(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Per head: rms_norm(x) * w * function(gate), where the function is silu or sigmoid."""
    (x, gate), (w,) = inputs, weights
    heads = x.reshape(-1, w.shape[-1])  # (tokens * heads, value_dim)
    factor = silu(gate) if attrs["function"] == "silu" else 1 / (1 + np.exp(-gate))
    return [(heads * inverse_rms(heads, attrs["eps"]) * w).reshape(x.shape) * factor]


# Fields of a step that either this rule or Mamba-2 leaves out.
NEUTRAL = {
    **dict.fromkeys(("bias_q", "bias_k", "bias_v", "skip", "norm"), VectorIndex(ABSENT)),
    **dict.fromkeys(("q_scale", "k_scale", "v_scale", "gate_scale", "dt_scale", "scale", "beta_scale"), 1.0),
    **dict.fromkeys(("dt_low", "dt_high", "eps", "l2_eps", "decay_floor"), 0.0),
}


@lower("delta_rule", "inference")
def lower_delta_rule(lowering: ServingLowering, group: Group) -> None:
    """Emits one step that also computes convolutions, norms and gates, and updates the states."""
    instr, attrs = group.instr, group.instr.attrs
    conv, q_norm, _, gates, norm = map(group.part, ("conv", "q_norm", "k_norm", "gates", "norm"))
    heads, keys = norm.outputs[0].dims[-1], instr.inputs[0].dims[-1]
    place, exchanged = lowering.head_results(norm.outputs[0])
    operands = (*conv.inputs, norm.inputs[1], *gates.inputs)
    vectors = [*(conv.weight(i) for i in range(3)), gates.weight(0), gates.weight(1), norm.weight(0)]
    own = {
        **dict(zip("qkvzab", map(lowering.place_of, operands), strict=True)),
        **dict(
            zip(("conv_q", "conv_k", "conv_v", "a_log", "dt_bias", "norm"), map(lowering.vector, vectors), strict=True)
        ),
        "out": place,
        "layer": attrs["layer"],
        "exchanged": exchanged,
        "corrects": True,
        "by_row": instr.inputs[3].dims[-1].width > 1,
        "gate": GATES[norm.attrs["function"]],
        "eps": norm.attrs["eps"],
        "l2_eps": q_norm.attrs["eps"],
        "scale": q_norm.attrs["scale"],
        "beta_scale": gates.attrs.get("beta_scale", 1.0),
        "decay_floor": gates.attrs.get("decay_floor", 0.0),
    }
    lowering.emit("delta_rule", **{**NEUTRAL, **own})
    taps = conv.weight(2).dims[0].width // heads.width
    of = tuple(key_heads(keys, heads, attrs["tiled"], lowering.mesh))
    lowering.caches[attrs["layer"]] = state_cache(keys, heads, taps, of)
