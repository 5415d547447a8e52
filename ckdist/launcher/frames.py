"""Messages between the supervisor and the agent of a host: a length, then msgpack.

A list whose first part is a word:

    to the agent     count, start JOB FIRST COUNT, carry PEER DATA, signal NUMBER, kill
    from the agent   hello VERSION, counted NODES, line RANK STREAM TEXT, carry PEER DATA, ended RANK CODE,
                     failed TEXT CODE, done
"""

import struct
from collections.abc import Iterator
from typing import Any

import msgpack

from ckdist.errors import CommError

GREETING = b"\nckdist agent\n"  # before the agent's first message: a shell may have written something before it
MAX_NOISE = 1 << 16
MAX_FRAME = 4 << 20
_LENGTH = struct.Struct("!I")


def packed(*parts: Any) -> bytes:
    """One message."""
    data = msgpack.packb(parts)
    assert data is not None  # as with every Packer that flushes itself
    return _LENGTH.pack(len(data)) + data


class FrameReader:
    """Takes bytes as they come, and gives whole messages. CommError for what is none."""

    def __init__(self, greeting: bytes = b"") -> None:
        """`greeting`: everything before it is left out."""
        self._buffer, self._greeting = bytearray(), greeting

    def add(self, data: bytes) -> Iterator[list[Any]]:
        """The messages that are whole now."""
        self._buffer += data
        if self._greeting:
            noise, found, rest = self._buffer.partition(self._greeting)
            if not found:
                if len(noise) > MAX_NOISE:
                    raise CommError(f"{len(noise)} bytes came, and no agent of ckdist's was among them")
                return
            self._buffer, self._greeting = rest, b""
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > MAX_FRAME:
                raise CommError(f"a message of {size} bytes was announced, and at most {MAX_FRAME} are taken")
            if len(self._buffer) < _LENGTH.size + size:
                return
            data = bytes(self._buffer[_LENGTH.size : _LENGTH.size + size])
            del self._buffer[: _LENGTH.size + size]
            yield self._message(data)

    @staticmethod
    def _message(data: bytes) -> list[Any]:
        try:
            message = msgpack.unpackb(data, strict_map_key=False)
        except (ValueError, TypeError, msgpack.UnpackException):  # TypeError: a list as a key
            message = None
        if not isinstance(message, list) or not message or not isinstance(message[0], str):
            raise CommError("something came that is no message")
        return message
