"""Convolutions and states of linear attention and Mamba-2 over packed sequences, and their gradients, for training."""

from dataclasses import replace
from typing import Any

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.program.ops.delta_rule import delta_gates, key_heads, silu, softplus
from ckdist.program.ops.op import TrainingLowering, lower, op, same, summed_over, total, vjp
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr, Value
from ckdist.program.step import ABSENT, ParameterIndex, ValueIndex

NORMED = ("l2_eps", "scale", "beta_scale", "decay_floor")  # attributes of the delta rule
LIMITS = ("dt_low", "dt_high")  # of Mamba-2


def infer_delta_packed(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of v. Raises LayoutError if heads do not fit together, or if ranks share a key head."""
    q, k, v, a, *b = inputs
    same("delta_packed", q, k)
    keys, values, gates = q.dims[-1], v.dims[-1], a.dims[-1]
    single = replace(values, width=1)
    if gates not in (single, replace(values, width=keys.width)) or any(x.dims[-1] != single for x in b):
        raise LayoutError(f"delta_packed: keys [{keys}], values [{values}] and gates [{gates}] do not fit")
    if weights[0].dims[0] != single or weights[1].dims[0] != gates or values.count % keys.count:
        raise LayoutError(f"delta_packed: heads [{values}] of keys [{keys}] have weights of [{weights[0]}]")
    if values.axis and (keys.axis != values.axis or values.unit * keys.count % values.count):
        raise LayoutError(
            f"delta_packed: {keys.count} key heads are shared by the ranks of {values.axis}, and a shared head's "
            f"gradient is on none of them; give {values.axis} at most {keys.count} ranks"
        )
    return [(v.dims, None)]


class _Heads:
    """The arrays of this rank's value heads, (tokens, heads, width)."""

    def __init__(self, context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs):
        keys, values = (attrs["inputs"][i].dims[-1] for i in (0, 2))
        self.of, self.corrects = key_heads(keys, values, attrs["tiled"], context.mesh), attrs["corrects"]
        q, k = (x.reshape(len(x), -1, keys.width) for x in inputs[:2])
        self.roots = [1 / np.sqrt((x * x).sum(axis=-1, keepdims=True) + attrs.get("l2_eps", 0.0)) for x in (q, k)]
        self.scales = (np.float32(attrs.get("scale", 1.0)), np.float32(1))
        self.raw = q, k
        if self.corrects:
            q, k = (x * root * by for x, root, by in zip((q, k), self.roots, self.scales, strict=True))
        self.q, self.k = q[:, self.of], k[:, self.of]
        self.v = inputs[2].reshape(len(inputs[2]), -1, values.width)
        a_log, dt_bias = weights[:2]
        if self.corrects:
            own = {
                "inputs": attrs["inputs"][3:5],
                "beta_scale": attrs["beta_scale"],
                "decay_floor": attrs["decay_floor"],
            }
            decay, self.beta = delta_gates(context, inputs[3:5], [a_log, dt_bias], own)
        else:
            self.beta = np.clip(softplus(inputs[3] + dt_bias), attrs["dt_low"], attrs["dt_high"])
            decay = np.exp(-np.exp(a_log) * self.beta)
        self.decay = decay.reshape(*self.beta.shape, -1)  # (tokens, heads, factors)

    def state(self, before: np.ndarray, t: int) -> tuple[np.ndarray, np.ndarray]:
        """The state after token t, (heads, keys, values), and the values that its key adds, without the factor beta."""
        faded = before * self.decay[t][:, :, None]
        taken = self.v[t] - np.einsum("hk,hkv->hv", self.k[t], faded) * self.corrects
        return faded + self.k[t][:, :, None] * (self.beta[t][:, None] * taken)[:, None], taken

    @property
    def start(self) -> np.ndarray:
        """The state before the first token of a sequence."""
        return np.zeros((len(self.of), self.k.shape[-1], self.v.shape[-1]), self.v.dtype)


@op("delta_packed", infer_delta_packed)
def delta_packed(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """`l2_norm`, `delta_gates` and `delta_rule` of each sequence; the states of `mamba2` if it does not correct.

    With a third weight (heads,), weight * v is added to the result.
    """
    heads = _Heads(context, inputs, weights, attrs)
    out = np.zeros_like(heads.v)
    for s in context.sequences():
        state = heads.start
        for t in range(s.start, s.stop):
            state, _ = heads.state(state, t)
            out[t] = np.einsum("hk,hkv->hv", heads.q[t], state)
    for skip in weights[2:]:
        out = out + skip[:, None] * heads.v
    return [out.reshape(inputs[2].shape)]


@vjp("delta_packed")
def delta_packed_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction for the gradients of the inputs. Those of the weights are sums of its results over tokens."""
    inputs, weights = instr.inputs, [w for w in instr.weights if w]
    names = [*("d_q", "d_k", "d_v", "d_a", "d_b")[: len(inputs)], "d_rate", "d_skip"][: len(inputs) + len(weights) - 1]
    found = g.emit("delta_grad", (*inputs, grads[0]), instr.weights, names, **instr.attrs)
    of_inputs, of_heads = found[: len(inputs)], found[len(inputs) :]
    sums: list[Value | None] = [None] * len(instr.weights)
    for at, value in enumerate((of_heads[0], of_inputs[3], *of_heads[1:])):  # of a_log, dt_bias and skip
        if wanted[len(inputs) + at]:
            (sums[at],) = g.emit("bias_grad", (value,), names=[f"d_{weights[at].name}"])
    return [*of_inputs, *sums]


def infer_delta_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the inputs of `delta_packed`, then a number for each head for a_log and for skip."""
    *operands, d_out = inputs
    infer_delta_packed(tuple(operands), weights, attrs)
    same("delta_grad", operands[2], d_out)
    heads = (d_out.dims[0], replace(d_out.dims[-1], width=1))
    return [*((x.dims, None) for x in operands), *(((heads), None) for _ in weights[1:])]


@op("delta_grad", infer_delta_grad)
def delta_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The gradients, from the last token to the first.

    With S' = decay S, u = v - k S' and S2 = S' + k beta u: dS2 += q do, dq = S2 do, du = beta k dS2,
    dk = dS2 beta u - S' du, dS' = dS2 - k du, d_decay = dS' S, dS = decay dS'. Without correction u = v, and du is not
    part of dk and dS'.
    """
    heads = _Heads(context, inputs, weights, attrs)
    d_out = inputs[-1].reshape(heads.v.shape)
    dq, dk, dv = np.zeros_like(heads.q), np.zeros_like(heads.k), np.zeros_like(heads.v)
    d_decay, d_beta = np.zeros_like(heads.decay), np.zeros_like(heads.beta)
    for s in context.sequences():
        states, taken = [heads.start], []
        for t in range(s.start, s.stop):
            state, own = heads.state(states[-1], t)
            states.append(state)
            taken.append(own)
        d = heads.start
        for i in reversed(range(s.stop - s.start)):
            t = s.start + i
            d = d + heads.q[t][:, :, None] * d_out[t][:, None]
            dq[t] = np.einsum("hkv,hv->hk", states[i + 1], d_out[t])
            added = np.einsum("hk,hkv->hv", heads.k[t], d)
            d_beta[t] = (added * taken[i]).sum(axis=-1)
            du = heads.beta[t][:, None] * added
            dv[t] = du
            dk[t] = np.einsum("hkv,hv->hk", d, heads.beta[t][:, None] * taken[i])
            if heads.corrects:
                dk[t] -= np.einsum("hkv,hv->hk", states[i] * heads.decay[t][:, :, None], du)
                d = d - heads.k[t][:, :, None] * du[:, None]
            rows = (d * states[i]).sum(axis=-1)  # (heads, keys)
            d_decay[t] = rows if d_decay.shape[-1] > 1 else rows.sum(axis=-1, keepdims=True)
            d = d * heads.decay[t][:, :, None]
    skips = [(d_out * heads.v).sum(axis=-1) for _ in weights[2:]]
    for skip in weights[2:]:
        dv += skip[:, None] * d_out
    gates = _gate_gradients(heads, inputs, weights, attrs, d_decay, d_beta)
    of_keys = [_of_keys(heads, x, i) for i, x in enumerate((dq, dk))]
    *of_gates, rate = gates
    made = [*of_keys, dv, *of_gates]
    return [*(x.reshape(own.shape) for x, own in zip(made, inputs, strict=False)), rate, *skips]


def _of_keys(heads: _Heads, dy: np.ndarray, which: int) -> np.ndarray:
    """The gradients of the key heads' raw queries or keys."""
    raw, root, scale = heads.raw[which], heads.roots[which], heads.scales[which]
    out = np.zeros_like(raw)
    for head, of in enumerate(heads.of):
        out[:, of] += dy[:, head]
    if not heads.corrects:
        return out
    return scale * root * (out - raw * root * root * (raw * out).sum(axis=-1, keepdims=True))


def _gate_gradients(
    heads: _Heads, inputs: Arrays, weights: Arrays, attrs: Attrs, d_decay: np.ndarray, d_beta: np.ndarray
) -> Arrays:
    """The gradients of a, of b if there is one, and of a_log for each token and head."""
    rate, shape = np.exp(weights[0])[:, None], heads.decay.shape
    x = (inputs[3] + weights[1]).reshape(shape)
    d_log = d_decay * heads.decay  # of the decay's logarithm
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    if not heads.corrects:
        dt = softplus(x)
        free = (dt > attrs["dt_low"]) & (dt < attrs["dt_high"])
        da = free * (d_beta[..., None] - d_log * rate) * sigmoid(x)
        return [da, (-d_log * rate * heads.beta[..., None]).sum(axis=-1)]
    s = heads.beta / np.float32(attrs["beta_scale"])
    db = d_beta * np.float32(attrs["beta_scale"]) * s * (1 - s)
    if attrs["decay_floor"] < 0:
        gate = sigmoid(rate * x)
        da = d_log * np.float32(attrs["decay_floor"]) * gate * (1 - gate) * rate
        return [da, db, (da * x).sum(axis=-1)]
    return [-d_log * rate * sigmoid(x), db, (-d_log * rate * softplus(x)).sum(axis=-1)]


def _fields(lowering: TrainingLowering, instr: Instr) -> dict[str, Any]:
    """The fields that both steps have. Raises LayoutError if this rank's heads are not even groups."""
    attrs, count = instr.attrs, 5 if instr.attrs["corrects"] else 4
    q, _, v, a = instr.inputs[:4]
    inputs = [*map(lowering.place_of, instr.inputs[:count]), ValueIndex(ABSENT)][:5]
    weights = [*map(lowering.parameter, instr.weights), ParameterIndex(ABSENT)][:3]
    fields: dict[str, Any] = dict(zip(("q", "k", "v", "a", "b"), inputs, strict=True))
    fields |= dict(zip(("a_log", "dt_bias", "skip"), weights, strict=True))
    fields |= local_heads(q.dims[-1], v.dims[-1], attrs["tiled"], lowering)
    fields |= {name: attrs.get(name, 0.0) for name in (*NORMED, *LIMITS)}
    return fields | {"by_row": a.dims[-1].width > 1, "corrects": attrs["corrects"]}


def local_heads(keys: Dim, values: Dim, tiled: bool, lowering: TrainingLowering) -> dict[str, Any]:
    """The numbers of this rank's heads. Raises LayoutError if they are not even groups, or none."""
    (begin, end), of = keys.share(lowering.mesh), key_heads(keys, values, tiled, lowering.mesh)
    count = end - begin
    groups = len(of) // count if count else 0
    if not groups or of != [h % count if tiled else h // groups for h in range(groups * count)]:
        raise LayoutError(f"training needs whole groups of value heads [{values}] for the key heads [{keys}] of a rank")
    return {"key_heads": count, "value_heads": len(of), "tiled": tiled}


@lower("delta_packed", "training")
def lower_delta_packed(lowering: TrainingLowering, instr: Instr) -> None:
    fields = _fields(lowering, instr)
    lowering.emit("delta_packed", **fields, out=lowering.output(instr.outputs[0]))


@lower("delta_grad", "training")
def lower_delta_grad(lowering: TrainingLowering, instr: Instr) -> None:
    fields, d_out = _fields(lowering, instr), lowering.place_of(instr.inputs[-1])
    count = len(instr.inputs) - 1
    made = list(map(lowering.output, instr.outputs))
    names = [*("dq", "dk", "dv", "da", "db")[:count], "d_rate", "d_skip"]
    results = dict(zip(names, made, strict=False))
    absent = {name: ValueIndex(ABSENT) for name in ("db", "d_skip") if name not in results}
    lowering.emit("delta_grad", **fields, **results, **absent, d_out=d_out)


def infer_convolve(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x. Raises LayoutError if the kernel has other channels."""
    x, w = inputs[0].dims[-1], weights[0].dims[0]
    if (w.count, w.axis) != (x.count, x.axis) or w.width % x.width:
        raise LayoutError(f"convolve of [{x}] has a kernel of [{w}]: {weights[0]}")
    return [(inputs[0].dims, None)]


def _shifted(context: RankContext, rows: np.ndarray, by: int) -> np.ndarray:
    """Row t - by of the same sequence in place of row t; zeros if there is none."""
    out = np.zeros_like(rows)
    for s in context.sequences():
        own = rows[s]
        kept = max(len(own) - abs(by), 0)
        out[s][max(by, 0) : max(by, 0) + kept] = own[max(-by, 0) : max(-by, 0) + kept]
    return out


def _sums(context: RankContext, x: np.ndarray, weights: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """(results before the activation, the kernel by channel)."""
    kernel = weights[0].reshape(x.shape[1], -1)  # (channels, taps)
    taps = kernel.shape[1]
    made = total(_shifted(context, x, taps - 1 - i) * kernel[:, i] for i in range(taps))
    return (made + weights[1] if len(weights) > 1 else made), kernel


@op("convolve", infer_convolve)
def convolve(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """f(bias + sum over i of w[:, i] * x[t - taps + 1 + i]) within each sequence; f is SiLU if it `activates`."""
    made, _ = _sums(context, inputs[0], weights)
    return [silu(made) if attrs["activates"] else made]


@vjp("convolve")
def convolve_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction for all gradients."""
    names = [f"d_{w.name}" for w in instr.weights if w] if any(wanted[1:]) else []
    more = {"weight_grads": len(names), "activates": instr.attrs["activates"]}
    found = g.emit("convolve_grad", (instr.inputs[0], grads[0]), instr.weights, ["d_x", *names], **more)
    return [*found, *([None] * (len(wanted) - len(found)))]


def infer_convolve_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x and of the weights whose gradients are wanted."""
    same("convolve_grad", *inputs)
    own = weights[: attrs["weight_grads"]]
    return [*infer_convolve(inputs, weights, attrs), *((w.dims, summed_over(inputs[0].dims[0])) for w in own)]


@op("convolve_grad", infer_convolve_grad)
def convolve_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """With ds = dy * f'(s): dx[t] = sum over i of w[:, i] * ds[t + taps - 1 - i], dw[:, i] = sum over t of ds * x."""
    x, dy = inputs
    s, kernel = _sums(context, x, weights)
    sigmoid = 1 / (1 + np.exp(-s))
    ds = dy * sigmoid * (1 + s * (1 - sigmoid)) if attrs["activates"] else dy
    shifts = [kernel.shape[1] - 1 - i for i in range(kernel.shape[1])]
    dx = total(_shifted(context, ds, -by) * kernel[:, i] for i, by in enumerate(shifts))
    dw = np.stack([(ds * _shifted(context, x, by)).sum(axis=0) for by in shifts], axis=1)
    return [dx, *[dw.reshape(weights[0].shape), ds.sum(axis=0)][: attrs["weight_grads"]]]


def _kernel_fields(lowering: TrainingLowering, instr: Instr) -> dict[str, Any]:
    """The fields that both steps have."""
    kernel, *bias = (instr.weight(i) for i in range(len(instr.weights)))
    return {
        "x": lowering.place_of(instr.inputs[0]),
        "weight": lowering.parameter(kernel),
        "bias": lowering.parameter(bias[0] if bias else None),
        "taps": kernel.dims[0].width // instr.inputs[0].dims[-1].width,
        "activates": instr.attrs["activates"],
    }


@lower("convolve", "training")
def lower_convolve(lowering: TrainingLowering, instr: Instr) -> None:
    lowering.emit("convolve", **_kernel_fields(lowering, instr), out=lowering.output(instr.outputs[0]))


@lower("convolve_grad", "training")
def lower_convolve_grad(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step, which also adds to the gradients of the weights."""
    dx, d_weight, d_bias, *_ = *instr.outputs, None, None
    fields = {"weight_gradient": lowering.added(d_weight), "bias_gradient": lowering.added(d_bias)}
    dy = lowering.place_of(instr.inputs[1])
    lowering.emit("convolve_grad", **_kernel_fields(lowering, instr), **fields, dy=dy, dx=lowering.output(dx))
