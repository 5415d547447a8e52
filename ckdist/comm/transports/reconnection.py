"""Restores the connection of two live ranks, for example after a firewall's reset.

The rank with the higher number connects. The other one knocks at its listener, in case it has not noticed. A refused
connection means that the peer has ended. Both prove the job's secret (`handshake`) and exchange the numbers of bytes
that they have received, sealed if the data is. Then each sends the rest again
(`native/comm/transports/sealed_socket.h`).
"""

import contextlib
import errno
import logging
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from ckdist import native
from ckdist.comm.bootstrap.handshake import Joined, Listener, Purpose, connect, receive_exactly
from ckdist.comm.bootstrap.sealed_messages import EXTRA, SealedMessages
from ckdist.comm.host_name import machine_name
from ckdist.comm.world_protocol import World
from ckdist.errors import CommError
from ckdist.native import CData

RESUME, KNOCK = b"back", b"lost"  # purposes of a connection; its lane: 0 for data, 1 for heartbeats
SHARE = 0.8  # of the ranks' timeout
_ATTEMPT_SECONDS, _AGAIN_SECONDS, _KNOCK_SECONDS = 1.0, 0.05, 0.5
_LOOK_SECONDS = 60.0
_RECEIVED = struct.Struct("!Q")

logger = logging.getLogger(__name__)

lib = native.lib


class Reconnection:
    """Threads that connect a transport's connections again. They end when the transport is closed.

    Args:
        transport: A native ckdist_transport over TCP, before its first use.
        listener: This rank's. It is closed at the end.
        addresses: Those of all ranks' listeners.
        timeout: Longest wait for a peer, in seconds.
    """

    def __init__(
        self, world: World, transport: CData, listener: Listener, addresses: Sequence[Any], timeout: float
    ) -> None:
        self._rank, self._size, self._hosts = world.rank, world.size, world.hosts
        self._listener, self._addresses, self._seconds = listener, addresses, SHARE * timeout
        self._source, self._patience_ms = listener.address[0], int(timeout * 1000)
        self._native = native.new(lib.ckdist_reconnection_new, transport)
        self._lock, self._mending = threading.Lock(), set[int]()
        self._mended: dict[int, float] = {}
        self._closed = False
        for work in (self._watch, self._serve):
            threading.Thread(target=work, daemon=True, name="ckdist-reconnection").start()

    def _watch(self) -> None:
        """Mends connections that a reader found broken."""
        closed, none = lib.ckdist_broken_closed, lib.ckdist_broken_none
        while (number := native.call(lib.ckdist_reconnection_next, self._native, _LOOK_SECONDS)) != closed:
            if number != none:
                threading.Thread(target=self._mend, args=(number,), daemon=True).start()
        self._closed = True
        self._listener.close()

    def _serve(self) -> None:
        """Answers the connections of peers."""
        while not self._closed:
            if found := self._listener.take_any(time.monotonic() + _LOOK_SECONDS):
                threading.Thread(target=self._answer, args=found, daemon=True).start()

    def _answer(self, purpose: Purpose, joined: Joined) -> None:
        peer, number = purpose.source, purpose.lane * self._size + purpose.source
        with joined.socket:
            if peer >= self._size or purpose.lane > 1:
                return
            if purpose.kind == RESUME and peer > self._rank:
                with contextlib.suppress(CommError):
                    self._resume(number, joined)
                    return
        is_late = time.monotonic() < self._mended.get(number, 0.0) + _KNOCK_SECONDS  # of a knock, which comes again
        if purpose.kind == RESUME or (purpose.kind == KNOCK and not is_late):
            self._mend(number)

    def _mend(self, number: int) -> None:
        """Connects again, or gives up: at once if the peer has ended, else after the time limit."""
        with self._lock:
            if number in self._mending:
                return
            self._mending.add(number)
        is_back = self._try(number)
        with self._lock:
            self._mending.discard(number)
        if is_back and self._waits(number):  # it broke again
            self._mend(number)

    def _try(self, number: int) -> bool:
        begun, problem, peer = time.monotonic(), "", number % self._size
        name = f"rank {peer} (on {machine_name(self._hosts[peer])})"
        level = logging.WARNING if number < self._size and peer < self._rank else logging.DEBUG  # one line for a break
        error = errno.ETIMEDOUT
        while (left := begun + self._seconds - time.monotonic()) > 0 and not self._closed:
            try:
                (self._connect if peer < self._rank else self._knock)(number, min(left, _ATTEMPT_SECONDS))
                self._mended[number] = time.monotonic()
                logger.log(level, "the connection to %s broke; it is back after %.1f s", name, time.monotonic() - begun)
                return True
            except ConnectionRefusedError:
                error = 0
                break
            except (CommError, OSError) as failure:
                problem = str(failure)
            time.sleep(_AGAIN_SECONDS)
        if error and not self._closed:
            logger.log(level, "the connection to %s broke, and is not back: %s", name, problem)
        with contextlib.suppress(CommError):
            native.call(lib.ckdist_reconnection_give_up, self._native, number, error)
        return False

    def _waits(self, number: int) -> bool:
        try:
            return bool(native.call(lib.ckdist_reconnection_waits, self._native, number))
        except CommError:
            return False  # the transport is closed

    def _connect(self, number: int, seconds: float) -> None:
        self._pause(number)
        joined = self._join(RESUME, number, seconds)
        with joined.socket:
            self._resume(number, joined)

    def _knock(self, number: int, seconds: float) -> None:
        """Makes the peer connect, and waits for it."""
        self._join(KNOCK, number, seconds).socket.close()
        end = time.monotonic() + _KNOCK_SECONDS
        while self._waits(number):
            if time.monotonic() > end:
                raise CommError("it did not connect again")
            time.sleep(_AGAIN_SECONDS)

    def _join(self, kind: bytes, number: int, seconds: float) -> Joined:
        lane, peer = divmod(number, self._size)
        host, port = self._addresses[peer]
        purpose = Purpose(kind, self._rank, peer, lane)
        return connect(
            (host, port), purpose, self._listener.secret, seconds, self._source, self._listener.sealed, once=True
        )

    def _resume(self, number: int, joined: Joined) -> None:
        """Exchanges the numbers of received bytes, and continues over the new connection."""
        connection, messages = joined.socket, SealedMessages(joined.keys) if joined.keys else None
        deadline, size = time.monotonic() + _ATTEMPT_SECONDS, _RECEIVED.size + (EXTRA if messages else 0)
        connects, there = number % self._size < self._rank, b""
        try:
            if connects:
                there = receive_exactly(connection, size, deadline)
            # The second pause of the side that connects. The other side has paused too, so whatever it takes for
            # acknowledged has arrived.
            received, attempt = self._pause(number)
            here = _RECEIVED.pack(received)
            connection.sendall(messages.seal(here) if messages else here)
            there = there or receive_exactly(connection, size, deadline)
            (sent,) = _RECEIVED.unpack(messages.open(bytearray(there)) if messages else there)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._patience_ms)
            if connects:
                receive_exactly(connection, 1, deadline)  # the other side reads the new connection
        except (OSError, ValueError, struct.error) as error:
            raise CommError(str(error)) from None
        last = sent, attempt, not connects
        native.check(lib.ckdist_reconnection_resume(self._native, number, connection.detach(), *last))

    def _pause(self, number: int) -> tuple[int, int]:
        """Ends the use of the old connection. Returns the received bytes, and the number of the attempt."""
        received, attempt = native.ffi.new("uint64_t *"), native.ffi.new("uint64_t *")
        native.check(lib.ckdist_reconnection_pause(self._native, number, received, attempt))
        return received[0], attempt[0]
