"""The definitions in numpy of the ops in `ckdist/program/ops/packed_attention.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference
from tests.support.references.attention_ops import Heads


@reference("attend_packed")
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


@reference("attend_grad")
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
