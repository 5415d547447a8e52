"""A step: what the executor runs between two barriers. Its kind is a struct of native/api/steps_inference.h or
steps_training.h, with the fields' names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from ckdist import native
from ckdist.errors import LayoutError
from ckdist.native import CData

ABSENT = -1  # an operand that is not there


class Index(int):
    """Which of a program's operands a step means."""

    letter = "?"


class ValueIndex(Index):
    """Of the buffers that activations lie in."""

    letter = "v"


class MatrixIndex(Index):
    """Of the packed matrices."""

    letter = "m"


class VectorIndex(Index):
    """Of the float32 vectors."""

    letter = "n"


class ParameterIndex(Index):
    """Of the parameters of training."""

    letter = "p"


class GradientIndex(Index):
    """Of the parameters, to whose gradient a step adds."""

    letter = "g"


class PackIndex(Index):
    """Of the packed matrices of training."""

    letter = "k"


AnyIndex = TypeVar("AnyIndex", bound=Index)


@dataclass(frozen=True)
class Span:
    """Consecutive operands, each a shard of one."""

    first: Index
    count: int

    def indices(self) -> list[Index]:
        """All of them."""
        return [type(self.first)(self.first + k) for k in range(self.count)]


NO_SPAN = Span(Index(0), 0)


@dataclass(frozen=True)
class Step:
    """`fields` are those of `struct ckdist_<kind>_step`, by name; a list stands for a pointer to so many.

    `rows`: tokens, selected, local_selected or host, as in `enum ckdist_rows`.
    """

    kind: str
    fields: dict[str, Any]
    rows: str = "tokens"

    def operands(self, of: type[AnyIndex]) -> list[AnyIndex]:
        """Every operand of a type that the step reads or writes, in the order of the fields."""
        return [index for index in _indices(self.fields) if isinstance(index, of) and index != ABSENT]

    def native(self, keep: list[Any]) -> CData:
        """The struct; what it and its pointers lie in is added to `keep`."""
        numbers = {"kind": getattr(native.lib, f"ckdist_step_{self.kind}")}
        numbers["rows"] = getattr(native.lib, f"ckdist_rows_{self.rows}")
        kind = f"struct ckdist_{self.kind}_step"
        types = native.field_types(native.ffi.typeof(kind))
        absent = types.keys() - self.fields.keys() - {"step"}
        missing = [name for name in types if name in absent and types[name].kind != "pointer"]  # which may be null
        if missing:
            raise LayoutError(f"a step {self.kind} lacks its field {missing[0]!r}")
        struct = native.struct(kind, {"step": numbers, **_plain(self.fields)}, keep)
        return native.ffi.cast("struct ckdist_step *", struct)

    def __str__(self) -> str:
        plain = lambda name, value: name.endswith("factor") and value == 1.0
        shown = {name: _text(value) for name, value in self.fields.items() if not plain(name, value)}
        rows = [] if self.rows == "tokens" else [f"rows={self.rows}"]
        return " ".join([f"{self.kind:13s}", *rows, *(f"{name}={text}" for name, text in shown.items() if text)])


def native_steps(steps: list[Step], keep: list[Any]) -> CData:
    """An array of pointers to the steps' structs; what it lies in is added to `keep`."""
    array = native.ffi.new("struct ckdist_step *[]", [step.native(keep) for step in steps])
    keep.append(array)
    return array


def _indices(value: Any) -> Iterator[Index]:
    """The indices in a field's value."""
    if isinstance(value, Index):
        yield value
    elif isinstance(value, Span):
        yield from value.indices()
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _indices(part)


def _plain(value: Any) -> Any:
    """A field's value as `native.struct` takes it."""
    if isinstance(value, Span):
        return {"first": int(value.first), "count": value.count}
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value


def _text(value: Any) -> str:
    """A field's value in a step's text; "" for one that says nothing."""
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


__all__ = [
    "ABSENT",
    "NO_SPAN",
    "GradientIndex",
    "Index",
    "MatrixIndex",
    "PackIndex",
    "ParameterIndex",
    "Span",
    "Step",
    "ValueIndex",
    "VectorIndex",
    "native_steps",
]
