"""attend_packed (attention over packed sequences) and its gradient, for training."""

from dataclasses import replace
from typing import Any

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.ops.attention_ops import Heads, cache_of, infer_attend
from ckdist.program.ops.op import TrainingLowering, lower, op, same, summed_over, vjp
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr


def infer_attend_packed(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of `attend`, and one number for each token and head."""
    (output,) = infer_attend(inputs, weights, attrs)
    tokens, heads = inputs[0].dims
    return [output, ((tokens, replace(heads, width=1)), None)]


@op("attend_packed", infer_attend_packed)
def attend_packed(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Causal grouped-query attention within each packed sequence.

    The second output is log(sum(exp(score))) with sinks, (tokens, heads).
    """
    heads = Heads(context, attrs)
    q, k, v = (heads.split(inputs, i) for i in range(3))
    out, log_sum_exp = np.zeros((*q.shape[:2], v.shape[2]), q.dtype), np.zeros(q.shape[:2], q.dtype)
    for s in context.sequences():
        for h, kv in enumerate(heads.kv_heads):
            scores = heads.scores(q[s, h], k[s, kv])
            largest = scores.max(axis=-1, keepdims=True)
            log_sum = largest + np.log(np.exp(scores - largest).sum(axis=-1, keepdims=True))
            for sinks in weights:
                log_sum = np.logaddexp(log_sum, sinks[h], dtype=scores.dtype)
            out[s, h] = np.exp(scores - log_sum) @ v[s, kv]
            log_sum_exp[s, h] = log_sum[:, 0]
    return [out.reshape(len(out), -1), log_sum_exp]


@lower("attend_packed", "training")
def lower_attend_packed(lowering: TrainingLowering, instr: Instr) -> None:
    if len(set(cache_of(instr, lowering.mesh).heads_per_kv)) != 1:
        raise LayoutError(
            f"training needs equal numbers of query heads for each kv_head of a rank, at least 1: {instr}"
        )
    q, k, v = map(lowering.operand, instr.inputs)
    out, log_sum_exp = map(lowering.output, instr.outputs)
    sinks = lowering.parameter(instr.weights[0] if instr.weights else None)
    fields = {"q": q, "k": k, "v": v, "sinks": sinks, "out": out, "log_sum_exp": log_sum_exp}
    lowering.emit("attend_packed", **fields, **_scores(instr))


def _scores(instr: Instr) -> dict[str, Any]:
    """The attributes that the scores depend on."""
    return {name: instr.attrs[name] for name in ("window", "scale", "soft_cap")}


@vjp("attend_packed")
def attend_packed_vjp(g: Emitter, instr: Instr, grads: Gradients, wanted: list[bool]) -> Gradients:
    """One instruction for all gradients, with sinks. Raises LayoutError if the log-sum-exp has a gradient."""
    if grads[0] is None or grads[1] is not None:
        raise LayoutError(
            f"attend_packed has no gradient through its log-sum-exp %{instr.outputs[1].name}; only through its result"
        )
    operands = (*instr.inputs, *instr.outputs, grads[0])
    sinks = instr.weights if any(wanted[3:]) else ()  # frozen sinks are part of the log-sum-exp
    names = ["d_q", "d_k", "d_v", *(f"d_{w.name}" for w in sinks if w)]
    found = g.emit("attend_grad", operands, sinks, names, **instr.attrs)
    return [*found, *([None] * (len(wanted) - len(found)))]


def infer_attend_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of q, k, v, and of sinks, partial over tokens. Raises LayoutError if ranks share a kv-head."""
    q, k, v, o, _, do = inputs
    infer_attend(inputs, weights, attrs)
    same("attend_grad", o, do)
    heads, kv_heads = q.dims[-1], k.dims[-1]
    if heads.axis and heads.unit * kv_heads.count % heads.count:
        raise LayoutError(
            f"attend_grad: {kv_heads.size} kv_heads sharded over {heads.axis} are shared by its ranks, "
            f"and a shared head's gradient is on neither; "
            f"give {heads.axis} at most {kv_heads.size} ranks"
        )
    return [(q.dims, None), (k.dims, None), (v.dims, None), *((w.dims, summed_over(q.dims[0])) for w in weights)]


@op("attend_grad", infer_attend_grad)
def attend_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """With p = exp(score - log_sum_exp): dv = p.T @ do, ds = p * (do @ v.T - rowsum(do * o)). A sink's dp is 0.

    Dao et al. 2022, arXiv:2205.14135.
    """
    heads = Heads(context, attrs)
    q, k, v, o, do = (heads.split(inputs, i) for i in (0, 1, 2, 3, 5))
    log_sum_exp = inputs[4]  # (tokens, heads)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for s in context.sequences():
        for h, kv in enumerate(heads.kv_heads):
            scores = heads.scores(q[s, h], k[s, kv])
            p = np.exp(scores - log_sum_exp[s, h, None])  # (tokens, positions)
            dv[s, kv] += p.T @ do[s, h]
            ds = p * (do[s, h] @ v[s, kv].T - (do[s, h] * o[s, h]).sum(axis=-1, keepdims=True))
            if attrs["soft_cap"]:
                ds = ds * np.where(p > 0, 1 - (scores / attrs["soft_cap"]) ** 2, 0)
            ds = ds * np.float32(attrs["scale"])
            dq[s, h] = ds @ k[s, kv]
            dk[s, kv] += ds.T @ q[s, h]
    d_sinks = [-(np.exp(sinks - log_sum_exp) * (do * o).sum(axis=-1)).sum(axis=0) for sinks in weights]
    return [dq.reshape(inputs[0].shape), dk.reshape(inputs[1].shape), dv.reshape(inputs[2].shape), *d_sinks]


@lower("attend_grad", "training")
def lower_attend_grad(lowering: TrainingLowering, instr: Instr) -> None:
    q, k, v, o, lse, d_o = instr.inputs
    inputs = {
        name: lowering.operand(value) for name, value in (("q", q), ("k", k), ("v", v), ("out", o), ("d_out", d_o))
    }
    dq, dk, dv = map(lowering.output, instr.outputs[:3])
    sinks = lowering.parameter(instr.weights[0] if instr.weights else None)
    gradient = lowering.gradient(instr.outputs[3] if instr.weights else None)
    fields = {"log_sum_exp": lowering.place_of(lse), "dq": dq, "dk": dk, "dv": dv}
    lowering.emit("attend_grad", **inputs, **fields, sinks=sinks, sinks_gradient=gradient, **_scores(instr))
