"""A step: the work of the executor between two barriers.

Each kind of step is a struct in native/api/steps_inference_api.h or steps_training_api.h, with the same field names.
"""

import functools
from dataclasses import dataclass
from typing import Any, TypeVar

from ckdist import native
from ckdist.errors import LayoutError
from ckdist.native import CData

ABSENT = -1  # index of an operand that is absent


class Index(int):
    """Index of an operand of a step. A subclass for each kind of operand; `letter` marks it in the text."""

    letter = "?"


class ValueIndex(Index):
    """Index of a value's buffer."""

    letter = "v"


class MatrixIndex(Index):
    """Index of a packed matrix."""

    letter = "m"


class VectorIndex(Index):
    """Index of a float32 vector."""

    letter = "n"


class ParameterIndex(Index):
    """Index of a trained parameter."""

    letter = "p"


class GradientIndex(Index):
    """Index of the parameter whose gradient a step writes."""

    letter = "g"


class PackIndex(Index):
    """Index of a pack of matrices in training."""

    letter = "k"


AnyIndex = TypeVar("AnyIndex", bound=Index)


@dataclass(frozen=True)
class Span:
    """Consecutive operands: the shards of one operand."""

    first: Index
    count: int

    def indices(self) -> list[Index]:
        """The indices of all shards."""
        return [type(self.first)(self.first + k) for k in range(self.count)]


NO_SPAN = Span(Index(0), 0)


@dataclass(frozen=True)
class Step:
    """One step of the executor: a `struct ckdist_<kind>_step`."""

    kind: str
    fields: dict[str, Any]  # the struct's fields by name; a list becomes a pointer to its items
    rows: str = "tokens"  # a name of `enum ckdist_rows`: tokens, selected, local_selected or host

    def operands(self, index_type: type[AnyIndex]) -> list[AnyIndex]:
        """All operands of a type that the step reads or writes, in the order of the fields."""
        return [index for index in self._indices if isinstance(index, index_type)]

    @functools.cached_property
    def _indices(self) -> list[Index]:
        """All operands that are not absent."""
        found: list[Index] = []
        _add_indices(self.fields, found)
        return [index for index in found if index != ABSENT]

    def native(self) -> CData:
        """A pointer to the native struct. It owns the struct and everything that the struct points to."""
        kind = f"ckdist_{self.kind}_step"
        if missing := [name for name in _required_fields(kind) if name not in self.fields]:
            raise LayoutError(f"a step {self.kind} lacks its field {missing[0]!r}")
        numbers = {"kind": getattr(native.lib, f"ckdist_step_{self.kind}"), "rows": self.rows}
        return native.struct(kind, step=numbers, **self.fields)

    def __str__(self) -> str:
        plain = lambda name, value: name.endswith("factor") and value == 1.0
        shown = {name: _text(value) for name, value in self.fields.items() if not plain(name, value)}
        rows = [] if self.rows == "tokens" else [f"rows={self.rows}"]
        return " ".join([f"{self.kind:13s}", *rows, *(f"{name}={text}" for name, text in shown.items() if text)])


@functools.cache
def _required_fields(struct: str) -> list[str]:
    """The fields that a step must have. A pointer may be absent: it is null then."""
    types = native.field_types(struct)
    return [name for name, ctype in types.items() if name != "step" and ctype.kind != "pointer"]


def _add_indices(value: Any, found: list[Index]) -> None:
    """Adds the indices in a field's value to `found`."""
    if isinstance(value, Index):
        found.append(value)
    elif isinstance(value, Span):
        found += value.indices()
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            _add_indices(part, found)


def _text(value: Any) -> str:
    """A field's value in the text of a step; "" if it is absent or neutral."""
    if isinstance(value, Index):
        return "" if value == ABSENT else f"{value.letter}{int(value)}"
    if isinstance(value, Span):
        first = _text(value.first)
        return "" if value.count == 0 else first if value.count == 1 else f"{first}+{value.count}"
    if isinstance(value, dict):
        parts = {name: _text(part) for name, part in value.items()}
        return "(" + " ".join(f"{name}={text}" for name, text in parts.items() if text) + ")"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(part) or '-' for part in value)}]"
    if isinstance(value, bool):
        return str(value) if value else ""
    return f"{value:g}" if value not in (ABSENT, 0.0) or (isinstance(value, int) and value == 0) else ""
