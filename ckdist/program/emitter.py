"""Appends instructions with fresh names and inferred dimensions, for tracing a forward and transforming a program."""

from collections.abc import Iterable, Sequence
from typing import Any

from ckdist.program.ops import op_named
from ckdist.program.program import Instr, Value, Weight


class Emitter:
    """Collects instructions in `instrs`. Names of `known` values are not used again."""

    def __init__(self, known: Iterable[Value] = ()):
        self.instrs: list[Instr] = []
        self._names: dict[str, int] = {}
        for value in known:
            name, _, count = value.name.rpartition(".")
            if name and count.isdecimal():  # the values that a stage receives have names without a number
                self._names[name] = max(self._names.get(name, -1), int(count))

    def emit(
        self,
        op: str,
        inputs: Sequence[Value],
        weights: Sequence[Weight | None] = (),
        names: Sequence[str] | None = None,
        **attrs: Any,
    ) -> tuple[Value, ...]:
        """Appends an instruction and returns its outputs.

        The outputs are named after `names`, with a number added. By default they are named after the op.

        Raises:
            LayoutError: The op cannot take the operands.
        """
        inputs, weights = tuple(inputs), tuple(weights)
        made = op_named(op).outputs(inputs, weights, attrs)
        named = zip(names or [op] * len(made), made, strict=True)
        outputs = tuple(Value(self._fresh(name), *fields) for name, fields in named)
        self.instrs.append(Instr(op, inputs, outputs, weights, attrs))
        return outputs

    def whole(self, value: Value, name: str = "") -> Value:
        """Emits an all_reduce for each axis that `value` is partial over, innermost first; returns the result.

        By default the result has the name of `value`, with another number.
        """
        name = name or value.name.rpartition(".")[0]
        for axis in reversed(value.partial):
            (value,) = self.emit("all_reduce", (value,), names=[name], axis=axis)
        return value

    def _fresh(self, name: str) -> str:
        count = self._names[name] = self._names.get(name, -1) + 1
        return f"{name}.{count}"
