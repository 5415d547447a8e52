"""The collectives. Only all_reduce has a gradient: no other one is in a program of training."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.ops.op import ServingLowering, TrainingLowering, lower, op, total, vjp
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Group, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr, Value
from ckdist.program.step import ABSENT, ValueIndex


def infer_all_reduce(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The same dims, no longer partial over the axis. Raises LayoutError if the value is not partial over it."""
    (x,), axis = inputs, attrs["axis"]
    if axis not in x.partial:
        raise LayoutError(f"all_reduce over {axis}: %{x.name} is not partial over it")
    return [(x.dims, tuple(other for other in x.partial if other != axis))]


@op("all_reduce", infer_all_reduce, collective=True, takes_partial=True)
def all_reduce(contexts: Sequence[RankContext], inputs: list[Arrays], attrs: Attrs) -> list[Arrays]:
    """The float32 sum over the ranks of the axis, in rank order."""
    return in_groups(contexts, inputs, attrs["axis"], total)


@lower("all_reduce", "inference")
def lower_all_reduce(lowering: ServingLowering, group: Group) -> None:
    """No step: readers read the summands of all ranks in place, or the producing step has a buffer for the sum."""
    (value,), (out,) = group.instr.inputs, group.instr.outputs
    place = lowering.at.get(lowering.source(value).name)
    if place is not None and (total_at := lowering.buffers[place].sum) != ABSENT:
        lowering.at[out.name] = ValueIndex(total_at)
    else:
        lowering.stands_for(out, value)


@lower("all_reduce", "training")
def lower_training_reduce(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits a step that sums in place.

    None for the loss, nor for gradients of weights: `TrainingLowering.reduced` inserts their steps.
    """
    (value,), (out,) = instr.inputs, instr.outputs
    if not value.dims or value in lowering.of_weight:
        return
    if value in lowering.beside:
        raise LayoutError(f"all_reduce of a value that shares its row with others: {instr}")
    lowering.emit("all_reduce", x=lowering.place_of(value))
    lowering.stands_for(out, value)


@vjp("all_reduce")
def all_reduce_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """The gradient itself: the gradient of a partial value is not partial."""
    return [grads[0]]


def infer_all_gather(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The same dims, no longer sharded over the axis."""
    return [(tuple(replace(d, axis=None) if d.axis == attrs["axis"] else d for d in inputs[0].dims), None)]


@op("all_gather", infer_all_gather, collective=True)
def all_gather(contexts: Sequence[RankContext], inputs: list[Arrays], attrs: Attrs) -> list[Arrays]:
    """Concatenates the shards of all ranks along the sharded dimension."""
    dims = attrs["inputs"][0].dims
    return in_groups(
        contexts,
        inputs,
        attrs["axis"],
        lambda parts: np.concatenate(parts, axis=[d.axis for d in dims].index(attrs["axis"])),
    )


@lower("all_gather", "inference")
def lower_all_gather(lowering: ServingLowering, group: Group) -> None:
    """If tokens are sharded, emits a step that copies the rows to memory that all ranks read.

    Else none: ranks write logits directly to the memory of rank 0.
    """
    (value,), (out,) = group.instr.inputs, group.instr.outputs
    if not value.dims[0].axis:
        lowering.stands_for(out, value)
        return
    width = value.dims[-1].elements
    slot = lowering.slot(width, lowering.max_tokens)
    lowering.slots += 1
    lowering.emit("gather_rows", **lowering.residual(value).fields(), out=slot)
    offset = lowering.buffers[slot].offset
    lowering.at[out.name] = lowering.buffer("outputs", width, offset=offset, rows=lowering.max_tokens, selected=True)


def infer_all_to_all(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """For values (tokens, n): the axis shards one of both dimensions before, and the other one afterwards.

    If another axis shards n too, then n is sharded over the joint axis of both. Rows may also become unsharded.
    """
    results: Inferred = []
    for x, to in zip(inputs, attrs["to"], strict=True):
        rows, last = x.dims
        # axes of n without and with this axis; both are None if each rank needs all of n
        axis, less, more = attrs["axis"], *((last.axis, to.axis) if rows.axis else (to.axis, last.axis))
        whole_rows = rows.axis == axis and less is None and more is None
        if not whole_rows and (
            rows.axis not in (None, axis)
            or (more != axis if less is None else more in (None, less, axis) or less == axis)
        ):
            raise LayoutError(
                f"all_to_all over {attrs['axis']}: it must shard one dimension of %{x.name}: [{rows}, {last}]"
            )
        if to.elements != last.elements:
            raise LayoutError(f"all_to_all: %{x.name} ends in [{last}], which cannot become [{to}]")
        results.append(((replace(rows, axis=None if rows.axis else axis), to), None))
    return results


@op("all_to_all", infer_all_to_all, collective=True)
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


@lower("all_to_all", "inference")
def lower_all_to_all(lowering: ServingLowering, group: Group) -> None:
    """No step: each reader reads the rows in the slot of the rank that has them."""
    for x, y in zip(group.instr.inputs, group.instr.outputs, strict=True):
        slot = lowering.buffers[lowering.place_of(x)]
        if x.dims[0].axis:  # to all tokens of local heads
            local = y.dims[-1].span(lowering.mesh)
            pieces = lowering.pieces(x.dims[-1])
            before = sum(end - begin for begin, end in pieces[: pieces.index(local)]) if local in pieces else 0
            view = replace(slot, place="tokens", lead=slot.lead + before)
        else:
            view = replace(slot, place="columns", width=y.dims[-1].local(lowering.mesh), rows=lowering.local_tokens)
        lowering.at[y.name] = lowering.buffer(**vars(view))


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
