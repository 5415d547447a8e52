"""The collectives: what ranks do together. Their gradients need at most a cut, for a gradient of a partial value is whole."""

from dataclasses import replace

import numpy as np

from ckdist.program.ops.op import op, uncut, vjp, whole


def infer_all_reduce(inputs, weights, attrs):
    return [(inputs[0].dims, None)]


@op("all_reduce", infer_all_reduce, collective=True)
def all_reduce(contexts, inputs, attrs):
    """The sum over the ranks of the axis in the order of ranks, in float32."""
    return in_groups(contexts, inputs, attrs["axis"], sum)


@vjp("all_reduce")
def all_reduce_vjp(g, instr, grads, wanted):
    return [grads[0]]


def infer_all_gather(inputs, weights, attrs):
    *lead, last = inputs[0].dims
    whole("all_gather", inputs[0])
    return [((*lead, replace(last, axis=None)), None)]


@op("all_gather", infer_all_gather, collective=True)
def all_gather(contexts, inputs, attrs):
    """The ranks' parts of the last dimension side by side."""
    return in_groups(contexts, inputs, attrs["axis"], lambda parts: np.concatenate(parts, axis=-1))


@vjp("all_gather")
def all_gather_vjp(g, instr, grads, wanted):
    return [*g.emit("shard", (grads[0],), names=["d_all"], dim=instr.inputs[0].dims[-1])]


def infer_shard(inputs, weights, attrs):
    whole("shard", inputs[0])
    uncut("shard", inputs[0])
    return [((*inputs[0].dims[:-1], attrs["dim"]), None)]


@op("shard", infer_shard)
def shard(context, inputs, weights, attrs):
    """This rank's part of the last dimension."""
    dim = attrs["dim"]
    begin, end = context.share(dim)
    return [inputs[0][..., begin * dim.width : end * dim.width]]


def in_groups(contexts, inputs, axis: str, combine) -> list[list[np.ndarray]]:
    """For every rank what `combine` makes of the values of the ranks that differ along `axis` alone, in their order."""
    places = [tuple(c.mesh.index(a) for a in c.mesh.axes if a != axis) for c in contexts]
    results = {place: combine([own for (own,), other in zip(inputs, places) if other == place]) for place in set(places)}
    return [[results[place]] for place in places]
