"""The collectives: what ranks do together. Their gradients need at most a cut, for a gradient of a partial value is whole."""

from dataclasses import replace

import numpy as np

from ckdist.program.ops.op import op, uncut, vjp, whole


def infer_all_reduce(inputs, weights, attrs):
    return [(inputs[0].dims, None)]


@op("all_reduce", infer_all_reduce, collective=True)
def all_reduce(contexts, inputs, attrs):
    """The sum over the ranks of the axis in the order of ranks, in float32."""
    return [[sum(inputs[peer][0] for peer in peers)] for peers in groups(contexts, attrs["axis"])]


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
    return [[np.concatenate([inputs[peer][0] for peer in peers], axis=-1)] for peers in groups(contexts, attrs["axis"])]


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


def groups(contexts, axis: str) -> list[list[int]]:
    """For every rank the ranks, itself among them, that differ from it along `axis` alone, in order."""
    others = [tuple(c.mesh.index(a) for a in c.mesh.axes if a != axis) for c in contexts]
    return [[peer for peer, place in enumerate(others) if place == own] for own in others]
