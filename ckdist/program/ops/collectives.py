"""The collectives: what ranks do together.

Their gradients need at most a cut, for a gradient of a partial value is whole.
"""

from dataclasses import replace

import numpy as np

from ckdist.errors import LayoutError
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
    whole("all_gather", inputs[0])
    return [(tuple(replace(d, axis=None) if d.axis == attrs["axis"] else d for d in inputs[0].dims), None)]


@op("all_gather", infer_all_gather, collective=True)
def all_gather(contexts, inputs, attrs):
    """The ranks' parts of the dimension that is cut side by side."""
    dims = attrs["inputs"][0].dims
    return in_groups(
        contexts,
        inputs,
        attrs["axis"],
        lambda parts: np.concatenate(parts, axis=[d.axis for d in dims].index(attrs["axis"])),
    )


@vjp("all_gather")
def all_gather_vjp(g, instr, grads, wanted):
    if not instr.inputs[0].dims[-1].axis:
        raise LayoutError(f"all_gather has no gradient over {instr.inputs[0].dims[0].name}; only over a last dimension")
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


def infer_all_to_all(inputs, weights, attrs):
    """Of values (tokens, n) where the axis cuts one of both dimensions: it cuts the other afterwards.

    Where another axis cuts n as well, the axis of both stands for it there.
    """
    results = []
    for x, to in zip(inputs, attrs["to"], strict=True):
        whole("all_to_all", x)
        rows, last = x.dims
        # of n: the cut besides, and with the axis
        axis, less, more = attrs["axis"], *((last.axis, to.axis) if rows.axis else (to.axis, last.axis))
        if rows.axis not in (None, axis) or (
            more != axis if less is None else more in (None, less, axis) or less == axis
        ):
            raise LayoutError(
                f"all_to_all over {attrs['axis']}: it must cut one dimension of %{x.name}: [{rows}, {last}]"
            )
        if to.elements != last.elements:
            raise LayoutError(f"all_to_all: %{x.name} ends in [{last}], which cannot become [{to}]")
        results.append(((replace(rows, axis=None if rows.axis else axis), to), None))
    return results


@op("all_to_all", infer_all_to_all, collective=True)
def all_to_all(contexts, inputs, attrs):
    """From own rows of all columns to all rows of own columns, or back."""
    columns = lambda c, of, dim: slice(*((edge - c.share(of)[0]) * dim.width for edge in c.share(dim)))
    results = [[] for _ in contexts]
    for i, (x, to) in enumerate(zip(attrs["inputs"], attrs["to"])):
        gathered = in_groups(
            contexts,
            [[own[i]] for own in inputs],
            attrs["axis"],
            lambda parts: np.concatenate(parts, axis=0 if x.dims[0].axis else 1),
        )
        for c, own, (whole_value,) in zip(contexts, results, gathered):
            own.append(
                whole_value[:, columns(c, x.dims[1], to)]
                if x.dims[0].axis
                else whole_value[slice(*c.rows(attrs["axis"], len(whole_value)))]
            )
    return results


def in_groups(contexts, inputs, axis: str, combine) -> list[list[np.ndarray]]:
    """For every rank what `combine` makes of the values of the ranks that differ along `axis` alone, in their order."""
    places = [tuple(c.mesh.index(a) for a in c.mesh.axes if a not in c.mesh.parts(axis)) for c in contexts]
    results = {
        place: combine([own for (own,), other in zip(inputs, places) if other == place]) for place in set(places)
    }
    return [[results[place]] for place in places]
