"""Loads the compiled library, with declarations from its C headers in `api/`.

The headers are the single source: at build time cffi parses the files that the C++ code includes. So both sides have
the same signatures, one wheel works with every Python version, and no call holds the GIL. This module only loads the
library and checks results. The environment variable CKDIST_LIBRARY selects another build of the library, for example a
sanitized one.
"""

import contextlib
import functools
import importlib
import itertools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from ckdist import errors

HERE = pathlib.Path(__file__).parent
LIBRARY = pathlib.Path(os.environ.get("CKDIST_LIBRARY") or HERE / "libckdist.so")
CData: TypeAlias = Any  # cffi objects, whose functions and fields type checkers cannot see
Converter: TypeAlias = Callable[[Any, list[Any]], Any]  # adds to the list the objects that must stay alive


def _load() -> tuple[CData, CData]:
    """Returns the parsed declarations and the library. Raises NativeError if a file is missing or damaged."""
    for file in (LIBRARY, HERE / "declarations.py"):
        if not file.exists():
            raise errors.NativeError(f"{file} is missing: run `make setup`, or install ckdist with pip")
    declared = importlib.import_module("ckdist.native.declarations").ffi
    # cffi completes a type at its first use, and aborts the process if two threads do so at once.
    for name in declared.list_types()[1]:
        with contextlib.suppress(declared.error):  # the type is opaque
            declared.sizeof(f"struct {name}")
    try:
        return declared, declared.dlopen(str(LIBRARY))
    except OSError as error:  # of another machine, or damaged
        raise errors.NativeError(f"{LIBRARY} cannot be loaded: {errors.one_line(error)}") from None


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


def pointer(array: np.ndarray, ctype: str | CData = "void *") -> CData:
    """The address of a numpy array's first element. The array must outlive the call.

    Raises:
        ValueError: The array is not C-contiguous.
    """
    return ffi.from_buffer(ctype, array)  # a seventh of the time that `array.ctypes` takes


def address(pointer: CData) -> int:
    """A pointer as a number."""
    return int(ffi.cast("intptr_t", pointer))


def numbers(enum: str, prefix: str) -> dict[str, int]:
    """The values of a C enum by name without `prefix`, in ascending order."""
    elements = sorted(ffi.typeof(f"enum {enum}").elements.items())
    return {name.removeprefix(prefix): number for number, name in elements}


@functools.cache
def dtype(struct: str) -> np.dtype:
    """The numpy dtype of a C struct of numbers, such structs, and arrays of these."""
    names, formats, offsets = [], [], []
    for name, field in ffi.typeof(f"struct {struct}").fields:
        item = field.type.item if field.type.kind == "array" else field.type
        kind = dtype(item.cname.removeprefix("struct ")) if item.kind == "struct" else _number_type(item)
        names.append(name)
        formats.append((kind, (field.type.length,)) if field.type.kind == "array" else kind)
        offsets.append(field.offset)
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": ffi.sizeof(f"struct {struct}")}
    )


def struct(name: str, /, **fields: Any) -> CData:
    """Allocates a `struct <name>` and returns the pointer, which keeps alive everything that the struct points to.

    Fields that are left out are 0. A value is converted by the C type of its field:
    - struct: a dict or a dataclass by the names of the fields, or a list of all fields
    - enum: a number, or a name without the words that all names of the enum begin with
    - array: a list
    - pointer: None (null), an address, a pointer, a numpy array of the same item type, a str or bytes, a dict or a
      dataclass (one struct), or a list (an array)

    Raises:
        NativeError: The struct has no such field, or an array has another type.
    """
    keep: list[Any] = []
    made = ffi.new(f"struct {name} *", _converted(ffi.typeof(f"struct {name}"), fields, keep))
    return ffi.gc(made, lambda _: keep.clear())


def call(function: CData, /, *arguments: Any) -> Any:
    """Calls a function of the library. Converts the arguments like the fields of `struct`, and checks the status.

    Not for every token: it costs microseconds more than a call of the function itself.

    Returns:
        The status. If the last parameter is left out: the value that the function stores there, None for a null
        pointer.

    Raises:
        NativeError: The first parameter is an object, and the argument is None.
        CkdistError: The function failed.
    """
    types, keep = ffi.typeof(function).args, list[Any]()
    if arguments and arguments[0] is None and _is_object(types[0]):
        raise errors.NativeError(f"this {types[0].item.cname.removeprefix('struct ')} is closed")
    values = [_converted(t, value, keep) for t, value in zip(types[: len(arguments)], arguments, strict=True)]
    out = [] if len(arguments) == len(types) else [ffi.new(types[-1])]
    status = function(*values, *out)
    if status is not None:  # the function is not void
        check(status)
    if not out:
        return status
    value = out[0][0]
    return None if types[-1].item.kind == "pointer" and value == ffi.NULL else value


def new(function: CData, /, *arguments: Any) -> CData:
    """`call`, for a function that makes an object. The pointer owns the object: it calls `<type>_free` at its end."""
    made = call(function, *arguments)
    name = ffi.typeof(made).item.cname.removeprefix("struct ")
    return ffi.gc(made, getattr(lib, f"{name}_free"))


@functools.cache
def field_types(struct: str) -> dict[str, CData]:
    """The types of a struct's fields, by name."""
    return _field_types(ffi.typeof(f"struct {struct}"))


@functools.cache
def _field_types(ctype: CData) -> dict[str, CData]:
    """The types of a struct's fields; empty if only the library knows them."""
    try:
        ffi.sizeof(ctype)  # cffi aborts the process for the fields of such a struct
    except ffi.error:
        return {}
    return {name: field.type for name, field in ctype.fields}


def _is_object(ctype: CData) -> bool:
    return ctype.kind == "pointer" and ctype.item.kind == "struct" and not _field_types(ctype.item)


@functools.cache
def _enumerators(ctype: CData) -> dict[str, int]:
    """The values of an enum by name, without the words that all names begin with."""
    elements = sorted(ctype.elements.items())
    words = zip(*(name.split("_") for _, name in elements), strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, words))
    return {"_".join(name.split("_")[common:]): number for number, name in elements}


@functools.cache
def _number_type(ctype: CData) -> np.dtype:
    """The numpy type of a C number."""
    kind = "f" if ctype.cname in ("float", "double") else "u" if ctype.cname.startswith("u") else "i"
    return np.dtype(f"{kind}{ffi.sizeof(ctype)}")


@functools.cache
def _array_type(item: CData) -> np.dtype:
    """The numpy type of a C array's items."""
    return dtype(item.cname.removeprefix("struct ")) if item.kind == "struct" else _number_type(item)


@functools.cache
def _first_field(ctype: CData) -> CData | None:
    """The type of the first field of the struct that the C type points to."""
    is_struct = ctype.kind == "pointer" and ctype.item.kind == "struct"
    return next(iter(_field_types(ctype.item).values()), None) if is_struct else None


@functools.cache
def _converter(ctype: CData) -> Converter | None:
    """Returns the function that gives a value a form that cffi can assign to the C type. None: any value has it."""
    kind = ctype.kind
    if kind == "pointer":
        return functools.partial(_pointer_to, ctype, ctype.item)
    if kind == "enum":
        return functools.partial(_enumerator, ctype.cname, _enumerators(ctype))
    if kind == "array":
        return functools.partial(_array, _converter(ctype.item))
    if kind == "struct":
        types = _field_types(ctype)
        converters = {name: convert for name, t in types.items() if (convert := _converter(t)) is not None}
        return functools.partial(_struct, ctype.cname, types, converters)
    return None


def _converted(ctype: CData, value: Any, keep: list[Any]) -> Any:
    convert = _converter(ctype)
    return value if convert is None else convert(value, keep)


def _enumerator(cname: str, elements: Mapping[str, int], value: Any, keep: list[Any]) -> Any:  # noqa: ARG001
    if not isinstance(value, str):
        return value
    if value not in elements:
        raise errors.NativeError(f"{cname} has no {value!r}; it has {', '.join(elements)}")
    return elements[value]


def _array(convert: Converter | None, value: Any, keep: list[Any]) -> Any:
    return value if convert is None or not isinstance(value, (list, tuple)) else [convert(v, keep) for v in value]


def _struct(
    cname: str, types: Mapping[str, CData], converters: Mapping[str, Converter], value: Any, keep: list[Any]
) -> Any:
    if isinstance(value, (list, tuple)):
        value = dict(zip(types, value, strict=True))
    fields = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if fields is None:
        return value
    if not fields.keys() <= types.keys():
        unknown = min(fields.keys() - types.keys())
        raise errors.NativeError(f"{cname} has no field {unknown!r}; it has {', '.join(types)}")
    if not converters:
        return fields
    return {name: converters[name](v, keep) if name in converters else v for name, v in fields.items()}


def _pointer_to(ctype: CData, item: CData, value: Any, keep: list[Any]) -> CData:
    """A pointer for a value that `struct` allows for one."""
    if value is None:
        return ffi.NULL
    if isinstance(value, int):
        return ffi.cast(ctype, value)
    if isinstance(value, np.ndarray):
        if item.kind != "void" and value.dtype != (wanted := _array_type(item)):
            raise errors.NativeError(f"{ctype.cname} needs an array of {wanted}, not of {value.dtype}")
        keep.append(value)
        return pointer(value, ctype)
    if isinstance(value, (str, bytes)):
        made = ffi.new("char[]", value.encode() if isinstance(value, str) else value)
    elif isinstance(value, (list, tuple)):
        convert = _converter(item)
        made = ffi.new(_array_of(item), value if convert is None else [convert(v, keep) for v in value])
    elif isinstance(value, dict) or hasattr(value, "__dict__"):
        made = ffi.new(ctype, _converted(item, value, keep))
    else:  # a pointer; a pointer to a struct is also one to the struct that it begins with
        keep.append(value)
        return ffi.cast(ctype, value) if _first_field(ffi.typeof(value)) == item else value
    keep.append(made)
    return made


@functools.cache
def _array_of(item: CData) -> CData:
    """The C type of arrays of any length."""
    return ffi.typeof(ffi.getctype(item, "[]"))


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
