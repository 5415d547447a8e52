"""A connection between two ranks at start-up: messages with a size limit, and heartbeats.

A thread reads messages and sends a heartbeat once a second, even while this process loads a model for an hour. So a
rank that is stopped or unplugged is noticed by its silence. Messages are queued until `receive` takes them.
"""

import collections
import contextlib
import select
import socket
import struct
import threading
import time

from ckdist.errors import CommError

MAX_MESSAGE = 64 << 20
MAX_WAITING = 1024, 4 * MAX_MESSAGE  # messages, and their bytes, that `receive` has not taken yet
HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 30.0  # without a heartbeat until a rank is lost
SEND_SECONDS = 120.0
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 5}
_LENGTH = struct.Struct("!I")  # 0: a heartbeat
_LAST = 1 << 31  # bit of the length: the sender gives up, and the message is the reason

_changed = threading.Condition()  # shared by all connections of this process


class BootstrapConnection:
    """This rank's end of its connection to rank `peer`.

    Args:
        connection: A connected socket, which this object takes over.
        quiet: Seconds before the peer's first heartbeat is expected.
        keys: They encrypt all messages (`handshake.Joined`). b"": none are encrypted.
    """

    def __init__(self, peer: int, connection: socket.socket, quiet: float = 0.0, keys: bytes = b"") -> None:
        self.peer, self.connection = peer, connection
        self.messages: collections.deque[bytes] = collections.deque()
        self.end: str | None = None  # why nothing more comes
        self.heard = time.monotonic() + quiet
        self._sending, self._closed = threading.Lock(), False
        self._sealed = None
        if keys:
            from ckdist.comm.bootstrap.sealed_messages import SealedMessages

            self._sealed = SealedMessages(keys)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEP_ALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, name, value)
        connection.settimeout(SEND_SECONDS)
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"ckdist-bootstrap-{peer}")
        self._thread.start()

    def send(self, data: bytes, last: bool = False) -> None:
        """Sends one message. Raises OSError on failure. `last`: the message is the reason why this rank gives up."""
        if len(data) > MAX_MESSAGE:
            raise CommError(f"a start-up message of {len(data)} bytes; at most {MAX_MESSAGE} can be sent")
        with self._sending:
            self._write(_LENGTH.pack(len(data) | (_LAST if last else 0)) + data)

    def check(self) -> None:
        """Raises CommError if the peer has sent no heartbeat for SILENT_SECONDS."""
        if (silent := time.monotonic() - self.heard) > SILENT_SECONDS:
            raise CommError(
                f"rank {self.peer} was lost at start-up: it has not been heard of for {silent:.0f} s, "
                "so it is stopped or cut off"
            )

    def close(self) -> None:
        """Ends the thread and the connection."""
        self._closed = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.connection.close()

    def _run(self) -> None:
        received, buffer, next_heartbeat, looked = bytearray(), bytearray(), 0.0, time.monotonic()
        try:
            while not self._closed:
                now = time.monotonic()
                if now - looked > 3 * HEARTBEAT_SECONDS:
                    # This process itself was stopped, so the peer's heartbeats were not read.
                    self.heard = max(self.heard, now)
                looked = now
                if now >= next_heartbeat:
                    next_heartbeat = now + HEARTBEAT_SECONDS
                    self._send_heartbeat()
                if self._is_ready(select.POLLIN, max(0.0, next_heartbeat - now)):
                    data = self.connection.recv(1 << 16)
                    if not data:
                        raise OSError("it closed its connection")
                    if self._sealed is not None:
                        received += data
                        data = self._sealed.open(received)
                    buffer += data
                    self._take(buffer)
        except (OSError, ValueError) as error:
            with _changed:
                self.end = self.end or str(error)
                _changed.notify_all()

    def _is_ready(self, event: int, seconds: float = 0.0) -> bool:
        # select.select() takes no descriptor above 1023, and rank 0 may have one for each of 1,024 ranks.
        poll = select.poll()
        poll.register(self.connection, event)
        return bool(poll.poll(1000 * seconds))

    def _write(self, data: bytes) -> None:
        self.connection.sendall(data if self._sealed is None else self._sealed.seal(data))

    def _send_heartbeat(self) -> None:
        # A message that is being sent shows the peer that this rank lives, so no heartbeat is needed.
        if self._sending.acquire(blocking=False):
            try:
                if self._is_ready(select.POLLOUT):
                    self._write(_LENGTH.pack(0))
            except OSError:
                pass  # the peer's last message may still be readable
            finally:
                self._sending.release()

    def _take(self, buffer: bytearray) -> None:
        """Moves complete messages out of the buffer."""
        with _changed:
            self.heard = max(self.heard, time.monotonic())
            while len(buffer) >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(buffer)
                last, size = size & _LAST, size & ~_LAST
                if size > MAX_MESSAGE:
                    raise ValueError(f"it announced {size} bytes, and at most {MAX_MESSAGE} are taken")
                if len(buffer) < _LENGTH.size + size:
                    break
                data = bytes(buffer[_LENGTH.size : _LENGTH.size + size])
                del buffer[: _LENGTH.size + size]
                if last:
                    raise ValueError(
                        "it gave up: " + "".join(c if c.isprintable() else "?" for c in data.decode(errors="replace"))
                    )
                if size:
                    self.messages.append(data)
            waiting = len(self.messages), sum(map(len, self.messages))
            if waiting[0] > MAX_WAITING[0] or waiting[1] > MAX_WAITING[1]:
                raise ValueError(
                    f"it sent {waiting[0]} messages of {waiting[1]} bytes before they were taken; "
                    f"at most {MAX_WAITING[0]} of {MAX_WAITING[1]} bytes are kept"
                )
            _changed.notify_all()


def receive(connections: dict[int, BootstrapConnection], seconds: float) -> list[bytes]:
    """Returns the next message of every connection, in their order.

    Raises CommError, which names the rank, as soon as one of them is known to be lost.
    """
    deadline = time.monotonic() + seconds
    with _changed:
        while missing := [c for c in connections.values() if not c.messages]:
            now = time.monotonic()
            for connection in missing:
                if connection.end is not None:
                    raise CommError(f"rank {connection.peer} was lost at start-up: {connection.end}")
                connection.check()
            if now > deadline:
                raise CommError(f"rank {missing[0].peer} was lost at start-up: it sent no message for {seconds:.0f} s")
            _changed.wait(min(HEARTBEAT_SECONDS, deadline - now + 0.01))
        return [c.messages.popleft() for c in connections.values()]
