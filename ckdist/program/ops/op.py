"""The definition of an op: inference of dimensions and placement, numpy reference, gradient rule, and lowering."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.program.ops.op_types import Attrs, Gradients, Inferred, Partial, Values, Weights
from ckdist.program.program import Value, Weight

if TYPE_CHECKING:  # these modules import the ops
    from ckdist.program.lower import ServingLowering
    from ckdist.program.lower_training import TrainingLowering
else:
    ServingLowering = TrainingLowering = Any

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Op:
    """The functions of an op.

    Attributes:
        infer: infer(inputs, weights, attrs) -> list of (dims, partial), one for each output.
        takes_partial: Inputs may be partial. Else `outputs` raises LayoutError for one that is.
        reference: reference(context, inputs, weights, attrs) -> list of arrays. A collective has
            reference(contexts, inputs, attrs), with one list of arrays per rank; `attrs["arrays"]` has the weights.
        vjp: vjp(g, instr, grads, wanted) -> list of gradients. `grads` are those of the outputs, None if nothing reads
            an output. It emits on `g` the gradients of the operands: inputs, then weights. An operand's gradient is
            None if `wanted` is False for it. The gradient of a value that is partial over an axis is not partial:
            it is the same on all ranks, since the summand of each rank has the weight 1 in the sum.
        lower: lower["inference"](lowering, group) and lower["training"](lowering, instr) emit steps.
        dtypes: Types of the outputs. Empty: all are f32.
    """

    name: str
    infer: Callable[..., Inferred]
    reference: Callable[..., list[Any]]
    vjp: Callable[..., Gradients] | None = None
    collective: bool = False
    lower: Mapping[str, Callable[..., None]] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()
    takes_partial: bool = False

    def outputs(self, inputs: Values, weights: Sequence[Weight | None], attrs: Attrs) -> list[tuple[Any, ...]]:
        """The (dims, dtype, partial) of each result. Raises LayoutError if the op cannot take the operands."""
        if not self.takes_partial:
            whole(self.name, *inputs)
        inferred = self.infer(inputs, weights, attrs)
        dtypes = self.dtypes or ("f32",) * len(inferred)
        return [(dims, dtype, axes(partial)) for dtype, (dims, partial) in zip(dtypes, inferred, strict=True)]


OPS: dict[str, Op] = {}


def op(name: str, infer: Callable[..., Inferred], **more: Any) -> Callable[[Function], Function]:
    """Registers the decorated function as the reference of op `name`. `more`: further fields of `Op`."""

    def register(reference: Function) -> Function:
        """Registers and returns it."""
        OPS[name] = Op(name, infer, reference, **more)
        return reference

    return register


def vjp(name: str) -> Callable[[Function], Function]:
    """Registers the decorated function as the vjp of op `name`."""

    def register(function: Function) -> Function:
        """Registers and returns it."""
        OPS[name] = replace(OPS[name], vjp=function)
        return function

    return register


def lower(name: str, step_set: str) -> Callable[[Function], Function]:
    """Registers the decorated function as the lowering of op `name` for `step_set`: "inference" or "training"."""

    def register(function: Function) -> Function:
        """Registers and returns it."""
        OPS[name] = replace(OPS[name], lower={**OPS[name].lower, step_set: function})
        return function

    return register


def whole(instr: str, *values: Value) -> None:
    """Raises LayoutError if a value is partial."""
    for value in values:
        if value.partial:
            raise LayoutError(
                f"{instr} needs a whole value, but %{value.name} is partial over {' and '.join(value.partial)}: "
                "wrap it in g.reduce()"
            )


def unsharded(instr: str, value: Value) -> None:
    """Raises LayoutError if the last dimension of a value is sharded."""
    if value.dims[-1].axis:
        raise LayoutError(
            f"{instr} needs all of {value.dims[-1].name}, but %{value.name} has it sharded over {value.dims[-1].axis}"
        )


def same(instr: str, *values: Value) -> None:
    """Raises LayoutError if values differ in their dimensions."""
    a = values[0]
    for b in values[1:]:
        if a.dims != b.dims:
            raise LayoutError(
                f"{instr} needs equal dimensions: %{a.name} is [{', '.join(map(str, a.dims))}], "
                f"%{b.name} [{', '.join(map(str, b.dims))}]"
            )


def total(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """0 + a + b + ..., in order. One or more arrays of one shape."""
    first, *more = arrays
    return sum(more, start=0 + first)


def axes(partial: Partial) -> tuple[str, ...]:
    """The second item of an `Inferred` entry as a tuple of axes."""
    return (partial,) if isinstance(partial, str) else partial or ()


def summed_over(*dims: Dim) -> tuple[str, ...]:
    """The axes that a sum over `dims` is partial over, in the order of the dimensions."""
    return tuple(dict.fromkeys(d.axis for d in dims if d.axis is not None))


def unchanged(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The `infer` of an op on one value."""
    return [(inputs[0].dims, inputs[0].partial)]


def alike(name: str) -> Callable[[Values, Weights, Attrs], Inferred]:
    """Makes the `infer` of an elementwise op on values of equal dimensions."""

    def infer(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
        """The dimensions of the operands. Raises LayoutError if they differ."""
        same(name, *inputs)
        return [(inputs[0].dims, None)]

    return infer
