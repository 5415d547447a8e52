"""Records that processes send each other. msgspec encodes them, and checks types and sizes when it decodes them."""

import re
from typing import Any, TypeVar

import msgspec

from ckdist.errors import RequestError

Kind = TypeVar("Kind")

WORDS = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "array": "a list",
    "object": "a map",
}  # fmt: skip


class Record(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of records. Fields that equal their defaults are not sent."""


class Message(Record, frozen=True, tag_field="op", tag=str.lower):
    """Base of records that are sent alone. The field `op` has the name of the class."""


def decode(decoder: msgspec.msgpack.Decoder[Kind], data: bytes) -> Kind:
    """Decodes a record. Raises RequestError if it is damaged, or a field is unknown, absent, or has a wrong value."""
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError, MemoryError) as error:  # msgspec's own errors are ValueErrors
        raise _refusal(error) from None


def converted(kind: type[Kind], values: Any) -> Kind:
    """Returns the record with these fields, which are maps, lists and plain values. Raises RequestError as `decode`."""
    try:
        return msgspec.convert(values, kind)
    except (ValueError, RecursionError, OverflowError) as error:
        raise _refusal(error) from None


def _refusal(error: Exception) -> RequestError:
    """Returns the error in one line that names the field: `samplers[2] must be a string, got 'int'`."""
    text, has_path, path = str(error).rpartition(" - at ")
    if not has_path:
        text, path = path, ""
    names = re.findall(r"\.(\w+)", path) or re.findall(r"^Object missing required field `(\w+)`", text)
    label = ("a key of " if "`key`" in path else "") + path.rpartition(".")[2].rstrip("`")
    text = " ".join(text[:200].split())
    expected = re.match("Expected `([^`]+)`", text)
    if not names:
        return RequestError(f"message is not valid: {text}")
    if expected is None:
        return RequestError(f"{label or names[-1]} is not valid: {text}", names[-1])
    words = " or ".join(WORDS.get(word, word) for word in expected[1].split(" | "))
    return RequestError(f"{label} must be {words}{text[expected.end() :]}", names[-1])
