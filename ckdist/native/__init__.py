"""Loads the compiled library, with declarations from its C headers in `api/`.

The headers are the single source: at build time cffi parses the files that the C++ code includes. So both sides have
the same signatures, one wheel works with every Python version, and no call holds the GIL. This module only loads the
library and checks results. The environment variable CKDIST_LIBRARY selects another build of the library, for example a
sanitized one.
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
CData: TypeAlias = Any  # cffi objects, whose functions and fields type checkers cannot see


def _load() -> tuple[CData, CData]:
    """Returns the parsed declarations and the library. Raises NativeError if one of the files is missing."""
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
    """Returns `status` if it is not negative, else raises the thread's last native error."""
    if status >= 0:
        return status
    message = ffi.string(lib.ckdist_last_error()).decode(errors="replace")
    raise _ERRORS.get(-status, errors.NativeError)(message)


def pointer(array: np.ndarray, ctype: str = "void *") -> CData:
    """The address of a numpy array's first element. The array must outlive the call.

    Raises:
        ValueError: The array is not C-contiguous.
    """
    if not array.flags.c_contiguous:
        raise ValueError("a native call needs a C-contiguous array")
    return ffi.cast(ctype, array.ctypes.data)


def numbers(enum: str, prefix: str) -> dict[str, int]:
    """The values of a C enum by name without `prefix`, in ascending order."""
    elements = sorted(ffi.typeof(f"enum {enum}").elements.items())
    return {name.removeprefix(prefix): number for number, name in elements}


def dtype(struct: str) -> np.dtype:
    """The numpy dtype of a C struct of numbers and arrays of numbers."""
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
    """Allocates a C struct with `fields`; other fields are 0. A list for a pointer field becomes an array.

    Appends the owners of the struct's memory and of its arrays to `keep`.
    """
    made = ffi.new(f"{ctype} *", _native_form(ffi.typeof(ctype), fields, keep))
    keep.append(made)
    return made


@functools.cache
def field_types(struct: CData) -> dict[str, CData]:
    """The types of a struct's fields, by name."""
    return {name: field.type for name, field in struct.fields}


def _native_form(ctype: CData, value: Any, keep: list[Any]) -> Any:
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
    """The instruction level of the kernels in use, chosen at load or by `use_isa`.

    Raises:
        ConfigError: CKDIST_ISA names a level that this build or this CPU lacks.
    """
    out = ffi.new("const char **")
    check(lib.ckdist_isa(out))
    return ffi.string(out[0]).decode()


def use_isa(name: str) -> None:
    """Selects the kernels of another level. Existing objects keep theirs.

    Raises:
        ConfigError: This build or this CPU lacks the level.
    """
    check(lib.ckdist_use_isa(ffi.new("char[]", name.encode())))


def isas() -> dict[str, str]:
    """Every level with kernels in the library, best first, and its missing CPU flags: "" if none is missing."""
    found = {}
    while (name := lib.ckdist_isa_name(len(found))) != ffi.NULL:
        found[ffi.string(name).decode()] = ffi.string(lib.ckdist_isa_lacks(len(found))).decode()
    return found
