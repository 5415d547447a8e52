"""The definitions in numpy of the ops in `ckdist/program/ops/collectives.py`."""

from collections.abc import Callable, Sequence

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference, total


@reference("all_reduce")
def all_reduce(contexts: Sequence[RankContext], inputs: list[Arrays], attrs: Attrs) -> list[Arrays]:
    """The float32 sum over the ranks of the axis, in rank order."""
    return in_groups(contexts, inputs, attrs["axis"], total)


@reference("all_gather")
def all_gather(contexts: Sequence[RankContext], inputs: list[Arrays], attrs: Attrs) -> list[Arrays]:
    """Concatenates the shards of all ranks along the sharded dimension."""
    dims = attrs["inputs"][0].dims
    return in_groups(
        contexts,
        inputs,
        attrs["axis"],
        lambda parts: np.concatenate(parts, axis=[d.axis for d in dims].index(attrs["axis"])),
    )


@reference("shard")
def shard(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """This rank's shard of the last dimension."""
    dim = attrs["dim"]
    begin, end = context.share(dim)
    return [inputs[0][..., begin * dim.width : end * dim.width]]


@reference("all_to_all")
def all_to_all(contexts: Sequence[RankContext], inputs: list[Arrays], attrs: Attrs) -> list[Arrays]:
    """Exchanges (own rows, all columns) for (all rows, own columns), or back."""
    columns = lambda c, of, dim: slice(*((edge - c.share(of)[0]) * dim.width for edge in c.share(dim)))
    side_by_side = {0: lambda parts: np.concatenate(parts, axis=0), 1: lambda parts: np.concatenate(parts, axis=1)}
    results: list[Arrays] = [[] for _ in contexts]
    for i, (x, to) in enumerate(zip(attrs["inputs"], attrs["to"], strict=True)):
        joined = side_by_side[0 if x.dims[0].axis else 1]
        gathered = in_groups(contexts, [[own[i]] for own in inputs], attrs["axis"], joined)
        for c, own, (whole_value,) in zip(contexts, results, gathered, strict=True):
            own.append(
                whole_value[:, columns(c, x.dims[1], to)]
                if x.dims[0].axis
                else whole_value[slice(*c.rows(attrs["axis"], len(whole_value)))]
            )
    return results


def in_groups(
    contexts: Sequence[RankContext], inputs: list[Arrays], axis: str, combine: Callable[[Arrays], np.ndarray]
) -> list[Arrays]:
    """Applies `combine` to the values of each group of ranks along `axis`, in rank order; returns one list per rank."""
    places = [tuple(c.mesh.index(a) for a in c.mesh.axes if a not in c.mesh.parts(axis)) for c in contexts]
    results = {
        place: combine([own for (own,), other in zip(inputs, places, strict=True) if other == place])
        for place in set(places)
    }
    return [[results[place]] for place in places]
