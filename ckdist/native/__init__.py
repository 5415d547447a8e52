"""The compiled library, seen through its C headers in `api/`.

The headers are the single source: the build has cffi read the same files that the C++ includes, so a signature cannot
differ between the two sides, one wheel serves every Python, and no call holds the GIL. This module loads and checks; it
computes nothing. The environment variable CKDIST_LIBRARY names another build of the library to load, as a sanitized
one.
"""

import functools
import importlib
import os
import pathlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from ckdist import errors

HERE = pathlib.Path(__file__).parent
LIBRARY = pathlib.Path(os.environ.get("CKDIST_LIBRARY") or HERE / "libckdist.so")
CData: TypeAlias = Any  # what cffi makes of the headers: no checker can see their functions and fields


def _load() -> tuple[CData, CData]:
    """The declarations that the build has read from the headers, and the library. NativeError where one is missing."""
    for file in (LIBRARY, HERE / "declarations.py"):
        if not file.exists():
            raise errors.NativeError(f"{file} is missing: run `make setup`, or install ckdist with pip")
    declared = importlib.import_module("ckdist.native.declarations").ffi
    return declared, declared.dlopen(str(LIBRARY))


ffi, lib = _load()

_ERRORS = {
    1: errors.NativeError,
    2: errors.ModelFileError,
    3: errors.CapacityError,
    4: errors.CommError,
    5: errors.ConfigError,
}


def check(status: int) -> int:
    """Return `status` when it is not negative; else raise the error that the native side left, as one line."""
    if status >= 0:
        return status
    message = ffi.string(lib.ckdist_last_error()).decode(errors="replace")
    raise _ERRORS.get(-status, errors.NativeError)(message)


def pointer(array: np.ndarray, ctype: str = "void *") -> CData:
    """The address of a numpy array's first element, as `ctype`; the array must outlive the call.

    Raises ValueError for an array that is not C-contiguous.
    """
    if not array.flags.c_contiguous:
        raise ValueError("a native call needs a C-contiguous array")
    return ffi.cast(ctype, array.ctypes.data)


def numbers(enum: str, prefix: str) -> dict[str, int]:
    """The numbers of a header's `enum`, by their names without `prefix`, the least first."""
    elements = sorted(ffi.typeof(f"enum {enum}").elements.items())
    return {name.removeprefix(prefix): number for number, name in elements}


def dtype(struct: str) -> np.dtype:
    """The numpy type of a header's struct of numbers and arrays of numbers."""
    names, formats, offsets = [], [], []
    for name, field in ffi.typeof(f"struct {struct}").fields:
        item = field.type.item if field.type.kind == "array" else field.type
        number = np.dtype(f"{'f' if item.cname in ('float', 'double') else 'i'}{ffi.sizeof(item)}")
        names.append(name)
        formats.append((number, (field.type.length,)) if field.type.kind == "array" else number)
        offsets.append(field.offset)
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": ffi.sizeof(f"struct {struct}")}
    )


def struct(ctype: str, fields: Mapping[str, Any], keep: list[Any]) -> CData:
    """A new struct with `fields` by name, 0 where one is not given; a list for a pointer becomes an array of so many.

    What it and its arrays lie in is added to `keep`.
    """
    made = ffi.new(f"{ctype} *", _native_form(ffi.typeof(ctype), fields, keep))
    keep.append(made)
    return made


@functools.cache
def field_types(struct: CData) -> dict[str, CData]:
    """The types of a struct's fields, by name."""
    return {name: field.type for name, field in struct.fields}


def _native_form(ctype: CData, value: Any, keep: list[Any]) -> Any:
    """A field's value as cffi takes it."""
    if isinstance(value, dict):
        types = field_types(ctype)
        unknown = [name for name in value if name not in types]
        if unknown:
            raise errors.NativeError(f"{ctype.cname} has no field {unknown[0]!r}; it has {', '.join(types)}")
        return {name: _native_form(types[name], part, keep) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_native_form(ctype.item, part, keep) for part in value]
        if ctype.kind == "array":
            return items
        keep.append(ffi.new(f"{ctype.item.cname}[]", items))
        return keep[-1]
    return value


def isa() -> str:
    """The level of instructions whose kernels were chosen, at load or by `use_isa`.

    Raises ConfigError where CKDIST_ISA names none that this CPU has.
    """
    out = ffi.new("const char **")
    check(lib.ckdist_isa(out))
    return ffi.string(out[0]).decode()


def use_isa(name: str) -> None:
    """Chooses the kernels of another level; what was opened before keeps its own.

    Raises ConfigError for a level that this build or this CPU lacks.
    """
    check(lib.ckdist_use_isa(ffi.new("char[]", name.encode())))


def isas() -> dict[str, str]:
    """Every level that the library has kernels for, best first, and the CPU flags missing for it: "" where it works."""
    found = {}
    while (name := lib.ckdist_isa_name(len(found))) != ffi.NULL:
        found[ffi.string(name).decode()] = ffi.string(lib.ckdist_isa_lacks(len(found))).decode()
    return found
