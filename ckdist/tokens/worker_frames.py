"""Messages between a worker with limits and its owner: two sizes, a map as msgpack, and a body of bytes."""

import socket
import struct
from typing import Any, cast

import msgpack

SIZES = struct.Struct("<IQ")  # of the map and of the body


def pack(head: dict[str, Any], body_size: int) -> bytes:
    """Returns the bytes before the body."""
    data = packed(head)
    return SIZES.pack(len(data), body_size) + data


def packed(value: Any) -> bytes:
    """Encodes `value` with msgpack."""
    return cast("bytes", msgpack.packb(value))  # the library has no types


def unpack_head(data: bytes | bytearray) -> dict[str, Any]:
    """Decodes the map."""
    return msgpack.unpackb(data, strict_map_key=False)


def send(connection: socket.socket, head: dict[str, Any], body: bytes) -> None:
    """Sends a map and a body."""
    connection.sendall(pack(head, len(body)))
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """Returns the next map and body, or None if the other side has closed."""
    sizes = _exactly(connection, SIZES.size)
    if sizes is None:
        return None
    head_size, body_size = SIZES.unpack(sizes)
    head, body = _exactly(connection, head_size), _exactly(connection, body_size)
    return None if head is None or body is None else (unpack_head(head), bytes(body))


def _exactly(connection: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = connection.recv_into(view[got:])
        if count == 0:
            return None
        got += count
    return data
