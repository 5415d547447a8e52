"""Messages between a worker with limits and its owner: two sizes, a map or record as msgpack, and a body of bytes."""

import socket
import struct
from typing import Any

from msgspec import msgpack

SIZES = struct.Struct("<IQ")  # of the map and of the body


def pack(head: Any, body_size: int) -> bytes:
    """Returns the bytes before the body."""
    data = packed(head)
    return SIZES.pack(len(data), body_size) + data


def packed(value: Any) -> bytes:
    """Encodes `value` with msgpack."""
    return msgpack.encode(value)


def send(connection: socket.socket, head: Any, body: bytes) -> None:
    """Sends a map or record and a body."""
    connection.sendall(pack(head, len(body)))
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """Returns the next map and body, or None if the other side has closed."""
    sizes = _exactly(connection, SIZES.size)
    if sizes is None:
        return None
    head_size, body_size = SIZES.unpack(sizes)
    head, body = _exactly(connection, head_size), _exactly(connection, body_size)
    return None if head is None or body is None else (msgpack.decode(head), bytes(body))


def _exactly(connection: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = connection.recv_into(view[got:])
        if count == 0:
            return None
        got += count
    return data
