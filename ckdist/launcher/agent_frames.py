"""Messages between the supervisor and the agent of a host: a length, then msgpack.

Each message is a list whose first element is a word:

    to the agent     count, start JOB FIRST COUNT, carry PEER DATA, signal NUMBER, kill, leave
    from the agent   hello VERSION, counted NODES, line RANK STREAM TEXT, carry PEER DATA, ended RANK CODE,
                     failed TEXT CODE, done
"""

import struct
from collections.abc import Iterator
from typing import Any

import msgpack

from ckdist.errors import CommError

GREETING = b"\nckdist agent\n"  # precedes the agent's first message: a shell may have printed before it
MAX_NOISE = 1 << 16
MAX_FRAME = 4 << 20
_LENGTH = struct.Struct("!I")


def packed(*parts: Any) -> bytes:
    """Encodes one message."""
    data = msgpack.packb(parts)
    assert data is not None  # always bytes, since the packer flushes itself
    return _LENGTH.pack(len(data)) + data


class FrameReader:
    """Splits a byte stream into messages. Raises CommError if the stream is invalid.

    Args:
        greeting: All bytes up to its end are skipped.
    """

    def __init__(self, greeting: bytes = b"") -> None:
        self._buffer, self._greeting = bytearray(), greeting

    def add(self, data: bytes) -> Iterator[list[Any]]:
        """Yields the messages that `data` completes."""
        self._buffer += data
        if self._greeting:
            noise, found, rest = self._buffer.partition(self._greeting)
            if not found:
                if len(noise) > MAX_NOISE:
                    raise CommError(f"{len(noise)} bytes arrived, but no greeting of ckdist's agent")
                return
            self._buffer, self._greeting = rest, b""
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > MAX_FRAME:
                raise CommError(f"a message of {size} bytes was announced, and at most {MAX_FRAME} are accepted")
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
            raise CommError("received bytes that are not a message")
        return message
