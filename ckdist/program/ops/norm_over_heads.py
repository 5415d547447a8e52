"""The norm over all heads of a token if ranks share the heads."""

from dataclasses import replace

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.program.ops.op import ServingLowering, lower, op
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, RankContext, Values, Weights


def infer_sum_squares(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """One number for each head of queries, then of keys. Partial if heads are sharded."""
    q, k = inputs
    heads, keys = q.dims[-1], k.dims[-1]
    return [((q.dims[0], Dim("squares", heads.count + keys.count)), heads.axis)]


@op("sum_squares", infer_sum_squares)
def sum_squares(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The sum of squares of each head. 0 for heads of other ranks, and for a kv-head that a lower rank has too."""
    q_dim, k_dim = (value.dims[-1] for value in attrs["inputs"])
    (begin, end), (first, _) = context.share(q_dim), context.share(k_dim)
    out = np.zeros((len(inputs[0]), q_dim.count + k_dim.count), inputs[0].dtype)
    out[:, begin:end] = (inputs[0] ** 2).reshape(len(out), end - begin, q_dim.width).sum(axis=-1)
    keys = (inputs[1] ** 2).reshape(len(out), -1, k_dim.width).sum(axis=-1)
    group = q_dim.count // k_dim.count
    for h in range(keys.shape[1]):
        if (first + h) * group >= begin:
            out[:, q_dim.count + first + h] = keys[:, h]
    return [out]


@lower("sum_squares", "inference")
def lower_sum_squares(lowering: ServingLowering, group: Group) -> None:
    """Emits one step. If queries, keys and values are exchanged, its sums follow them in the same row."""
    q, k = map(lowering.place_of, group.instr.inputs)
    (squares,), keys = group.instr.outputs, group.instr.inputs[1].dims[-1]
    count, source = squares.dims[-1].count, lowering.buffers[q]
    behind = replace(source, lead=source.width - count)
    out = lowering.buffer(**vars(behind)) if source.place == "slot" else lowering.result(squares)
    instrs = lowering.program.instrs
    attend = next(i for i in instrs[instrs.index(group.instr) :] if i.op == "attend")
    lowering.emit("sum_squares", q=q, k=k, out=out, layer=attend.attrs["layer"])
    lowering.key_places = ()
    if source.place == "slot":  # a view of the slot, for attention
        heads = [e // keys.width for begin, end in lowering.pieces(keys) for e in range(begin, end, keys.width)]
        lowering.key_places = tuple(map(heads.index, range(keys.count)))
        out = lowering.buffer(**vars(replace(behind, place="tokens")))
    lowering.at[squares.name] = out


def infer_rms_norm_heads(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of queries and keys. Raises LayoutError if a weight has another size."""
    q, k, squares = inputs
    for x, w in zip((q, k), weights, strict=True):
        if w.dims[-1] != x.dims[-1]:
            raise LayoutError(f"rms_norm_heads of [{x.dims[-1]}] has a weight of [{w.dims[-1]}]: {w}")
    if squares.dims[-1].count != q.dims[-1].count + k.dims[-1].count:
        raise LayoutError(f"rms_norm_heads needs a square for each head, and %{squares.name} has {squares.dims[-1]}")
    return [(q.dims, None), (k.dims, None)]


@op("rms_norm_heads", infer_rms_norm_heads)
def rms_norm_heads(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns x / sqrt(mean(x^2) + eps) * w over all heads of a token, for queries and keys. The sums of squares are
    given.
    """
    *parts, squares = inputs
    dims = [value.dims[-1] for value in attrs["inputs"][:2]]
    results, at = [], 0
    for x, w, dim in zip(parts, weights, dims, strict=True):
        mean = squares[:, at : at + dim.count].sum(axis=-1, keepdims=True) / dim.elements
        results.append(x / np.sqrt(mean + np.float32(attrs["eps"])) * w)
        at += dim.count
    return results


@lower("rms_norm_heads", "inference")
def lower_rms_norm_heads(lowering: ServingLowering, group: Group) -> None:
    """No step: the step of attention computes the norm."""
    for x, y in zip(group.instr.inputs, group.instr.outputs, strict=False):
        lowering.stands_for(y, x)
