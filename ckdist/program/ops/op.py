"""What an op is: inference of dimensions and placement, a definition in numpy, the rule by which a gradient goes back
through it, and how it becomes steps.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.program.program import Value, Weight

Values: TypeAlias = tuple[Value, ...]
Weights: TypeAlias = tuple[Weight, ...]  # a linear's biases, which may be absent, are not read by `infer`
Attrs: TypeAlias = Mapping[str, Any]
Partial: TypeAlias = str | tuple[str, ...] | None  # an axis, several, or none
Inferred: TypeAlias = list[tuple[tuple[Dim, ...], Partial]]  # (dims, partial) of every output
Arrays: TypeAlias = list[np.ndarray]
Gradients: TypeAlias = list[Value | None]

Reference = TypeVar("Reference", bound=Callable[..., Any])
Vjp = TypeVar("Vjp", bound=Callable[..., Gradients])
Lower = TypeVar("Lower", bound=Callable[..., None])


@dataclass(frozen=True)
class Op:
    """`infer(inputs, weights, attrs)` -> list of (dims, partial); `reference(context, inputs, weights, attrs)` -> list
    of arrays.

    A collective's reference(contexts, inputs, attrs) takes and returns one entry per rank in place of each array; the
    ranks' weights are `attrs["arrays"]`.

    `vjp(g, instr, grads, wanted)` -> list of gradients: it emits on `g` what turns the gradients of `instr`'s outputs
    (`grads`; None where nothing reads one of several outputs) into those of its operands, inputs then weights;
    `wanted` says which of them, the others are None. The gradient of a value that is partial over an axis is whole over
    it: what every rank adds to the sum counts alike.

    `lower["inference"](lowering, group)` and `lower["training"](lowering, instr)` emit the steps of each set.
    """

    name: str
    infer: Callable[..., Inferred]
    reference: Callable[..., list[Any]]
    vjp: Callable[..., Gradients] | None = None
    collective: bool = False
    lower: Mapping[str, Callable[..., None]] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()  # of the outputs; none: all are f32


OPS: dict[str, Op] = {}


def op(
    name: str, infer: Callable[..., Inferred], collective: bool = False, dtypes: tuple[str, ...] = ()
) -> Callable[[Reference], Reference]:
    """Registers the decorated function as the reference of op `name`."""

    def register(reference: Reference) -> Reference:
        """Registers and returns it."""
        OPS[name] = Op(name, infer, reference, collective=collective, dtypes=dtypes)
        return reference

    return register


def vjp(name: str) -> Callable[[Vjp], Vjp]:
    """Registers the decorated function as the vjp of op `name`."""

    def register(function: Vjp) -> Vjp:
        """Registers and returns it."""
        OPS[name] = replace(OPS[name], vjp=function)
        return function

    return register


def lower(name: str, step_set: str) -> Callable[[Lower], Lower]:
    """Registers the decorated function as what lowers op `name` to a set of steps: "inference" or "training"."""

    def register(function: Lower) -> Lower:
        """Registers and returns it."""
        OPS[name] = replace(OPS[name], lower={**OPS[name].lower, step_set: function})
        return function

    return register


def whole(instr: str, *values: Value) -> None:
    """Refuses a partial value where a whole one is needed."""
    for value in values:
        if value.partial:
            raise LayoutError(
                f"{instr} needs a whole value, but %{value.name} is partial over {' and '.join(value.partial)}: "
                "wrap it in g.reduce()"
            )


def unsharded(instr: str, value: Value) -> None:
    """Refuses a value whose last dimension is sharded."""
    if value.dims[-1].axis:
        raise LayoutError(
            f"{instr} needs all of {value.dims[-1].name}, but %{value.name} has it sharded over {value.dims[-1].axis}"
        )


def same(instr: str, *values: Value) -> None:
    """Refuses values of different dimensions."""
    a = values[0]
    for b in values[1:]:
        if a.dims != b.dims:
            raise LayoutError(
                f"{instr} needs equal dimensions: %{a.name} is [{', '.join(map(str, a.dims))}], "
                f"%{b.name} [{', '.join(map(str, b.dims))}]"
            )


def total(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """The sum of one or more arrays of one shape, in their order, from zero."""
    first, *more = arrays
    return sum(more, start=0 + first)


def axes(partial: Partial) -> tuple[str, ...]:
    """The axes of what an `infer` says."""
    return (partial,) if isinstance(partial, str) else partial or ()


def summed_over(*dims: Dim) -> tuple[str, ...]:
    """The axes over which a sum over `dims` comes out partial, in the order of the dimensions."""
    return tuple(dict.fromkeys(d.axis for d in dims if d.axis is not None))


def unchanged(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The `infer` of an op of one value that may be partial."""
    return [(inputs[0].dims, inputs[0].partial)]


def unchanged_whole(name: str) -> Callable[[Values, Weights, Attrs], Inferred]:
    """The `infer` of an op that works element by element on whole values of the same dimensions."""

    def infer(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
        """The same dimensions, whole. LayoutError where an operand is partial or differs."""
        whole(name, *inputs)
        same(name, *inputs)
        return [(inputs[0].dims, None)]

    return infer
