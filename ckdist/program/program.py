"""A traced forward as data: a flat list of instructions over named, shaped values, with a readable text form.

A program does not depend on the rank. All ranks of a layout have the same text, so ranks compare its hash to check
that they agree.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckdist.errors import LayoutError
from ckdist.layout import Dim


@dataclass(frozen=True)
class Value:
    """A named array. It is the sum of the arrays of all ranks along the mesh axes in `partial`."""

    name: str
    dims: tuple[Dim, ...]
    dtype: str = "f32"
    partial: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def selected(self) -> bool:
        """True if its rows are the positions whose logits are needed, not all tokens."""
        return self.dims[0].name == "outputs"

    @property
    def rows(self) -> str:
        """The kind of its rows, as in `Step.rows`: tokens, selected, or local_selected if selected rows are sharded."""
        if not self.selected:
            return "tokens"
        return "local_selected" if self.dims[0].axis is not None else "selected"

    def __str__(self) -> str:
        return f"%{self.name}: {self.dtype}[{', '.join(map(str, self.dims))}]" + (
            f" partial({', '.join(self.partial)})" if self.partial else ""
        )


@dataclass(frozen=True)
class Weight:
    """A parameter by its Hugging Face name. It keeps the type that it has in the checkpoint."""

    name: str
    dims: tuple[Dim, ...]

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def elements(self) -> int:
        """Elements of the whole weight."""
        return math.prod(dim.elements for dim in self.dims)

    @property
    def unsharded(self) -> "Weight":
        """The whole weight: the same name, with dimensions that are not sharded."""
        return Weight(self.name, tuple(replace(d, axis=None) for d in self.dims))

    def __str__(self) -> str:
        return f"@{self.name}"


@dataclass(frozen=True)
class Instr:
    """outputs = op(inputs; weights, attrs)."""

    op: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    weights: tuple[Weight | None, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def weight(self, index: int) -> Weight:
        """The weight at `index`. Raises LayoutError if it is absent. A linear's bias, for example, is optional."""
        found = self.weights[index]
        if found is None:
            raise LayoutError(f"{self.op} needs its weight {index}: {self}")
        return found

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """A linear's weights without their biases."""
        return tuple(self.weight(index) for index in range(len(self.weights) // 2))

    def __str__(self) -> str:
        operands = [f"%{v.name}" for v in self.inputs] + ["-" if w is None else str(w) for w in self.weights]
        # attributes that are dimensions appear in the outputs already
        shown = {k: v for k, v in self.attrs.items() if not isinstance(v, (Dim, tuple))}
        attrs = "".join(f", {k}={v:g}" if isinstance(v, float) else f", {k}={v}" for k, v in shown.items())
        made = f"{', '.join(map(str, self.outputs))} = " if self.outputs else ""
        return f"{made}{self.op}({', '.join(operands)}{attrs})"


@dataclass(frozen=True)
class Program:
    """A list of instructions. `str(program)` is its golden text.

    `boundaries` are values between blocks: a block can be computed again from the boundary before it. They do not
    change the result of a run, so the text leaves them out. `carried` are further values that cross them.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    instrs: tuple[Instr, ...]
    boundaries: tuple[Value, ...] = ()
    carried: tuple[Value, ...] = ()

    def __str__(self) -> str:
        returned = ", ".join(f"%{v.name}" for v in self.outputs)
        lines = f"program({', '.join(map(str, self.inputs))})", *(f"  {i}" for i in self.instrs), f"  return {returned}"
        return "\n".join(lines) + "\n"

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Each weight once, in the order of first use."""
        return tuple(dict.fromkeys(w for i in self.instrs for w in i.weights if w is not None))

    def digest(self) -> str:
        """Hex digest of the text: two ranks with different digests would run different collectives."""
        return hashlib.sha256(str(self).encode()).hexdigest()
