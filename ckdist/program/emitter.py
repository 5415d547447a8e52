"""Appending instructions: fresh names, inferred dimensions. What tracing a forward and transforming a program share."""

from collections.abc import Iterable, Sequence
from typing import Any

from ckdist.program.ops import OPS
from ckdist.program.ops.op import axes
from ckdist.program.program import Instr, Value, Weight


class Emitter:
    """`instrs` is what was emitted so far; names of `known` values are not given again."""

    def __init__(self, known: Iterable[Value] = ()):
        self.instrs: list[Instr] = []
        self._names: dict[str, int] = {}
        for value in known:
            name, _, count = value.name.rpartition(".")
            if name and count.isdecimal():  # a stage has others
                self._names[name] = max(self._names.get(name, -1), int(count))

    def emit(
        self,
        op: str,
        inputs: Sequence[Value],
        weights: Sequence[Weight | None] = (),
        names: Sequence[str] | None = None,
        **attrs: Any,
    ) -> tuple[Value, ...]:
        """Appends an instruction; its outputs, called after `names` (default: the op).

        LayoutError where `infer` refuses.
        """
        inputs, weights = tuple(inputs), tuple(weights)
        inferred = OPS[op].infer(inputs, weights, attrs)
        outputs = tuple(
            Value(self._fresh(name), dims, dtype, axes(partial))
            for name, dtype, (dims, partial) in zip(
                names or [op] * len(inferred), OPS[op].dtypes or ("f32",) * len(inferred), inferred, strict=True
            )
        )
        self.instrs.append(Instr(op, inputs, outputs, weights, attrs))
        return outputs

    def whole(self, value: Value) -> Value:
        """The value, summed over the ranks where it is partial: over the innermost of its axes first."""
        name = value.name.rpartition(".")[0]
        for axis in reversed(value.partial):
            (value,) = self.emit("all_reduce", (value,), names=[name], axis=axis)
        return value

    def _fresh(self, name: str) -> str:
        """`name` with a number that no other value of that name has."""
        count = self._names[name] = self._names.get(name, -1) + 1
        return f"{name}.{count}"
