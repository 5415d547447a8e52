"""Both ends of a TCP connection prove that they belong to the same job, and state the connection's purpose.

Both hold the job's secret. Each sends an HMAC-SHA256 over both ends' fresh nonces, the purpose and its own role, so
nothing can be replayed or reflected. The client proves first: a stranger receives nothing that would help to guess the
secret. Both derive the keys that seal later traffic from the secret and the nonces (`native/comm/transports/sealer.h`).
"""

import collections
import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import stat
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckdist.comm.world_protocol import Log, World
from ckdist.errors import CommError, ConfigError
from ckdist.regular_file import open_regular

SECRET_VARIABLE = "CKDIST_JOB_SECRET_FILE"  # noqa: S105, the name of a variable
MIN_SECRET = 16
REMEDY = "`(umask 077; head -c 32 /dev/urandom | base64 > FILE)`"
_MAGIC = b"ckdist2\n"
_HELLO = struct.Struct("!8s32s?4sIII")  # magic, nonce, sealed, purpose, from, to, lane
_PURPOSE = 41  # bytes before the purpose
_PROOF_BYTES = hashlib.sha256().digest_size
_STRANGERS = 256  # connections before their proof; at one more, the oldest is closed
_FIRST_SECONDS = 2.0  # for a connection's first bytes: a rank sends them as soon as it is connected
_AGAIN_SECONDS = 0.05
_DROPPED_LINES = 20  # log lines about connections that were dropped


@dataclass(frozen=True)
class Purpose:
    """The purpose of a connection: `kind` (four letters), the ranks at its ends, and its number among equal ones."""

    kind: bytes
    source: int
    target: int
    lane: int = 0


class Joined(NamedTuple):
    """An authenticated connection, and its keys (`sealed_messages`), or b"" if it is not encrypted."""

    socket: socket.socket
    keys: bytes


def read_secret(path: str | None = None) -> bytes:
    """Reads the job's secret from a file that only its owner can read.

    Args:
        path: Default: the file that CKDIST_JOB_SECRET_FILE names.

    Raises:
        ConfigError: No file is named, or it cannot be read, is readable by others, or has a wrong size.
    """
    path = path or os.environ.get(SECRET_VARIABLE)
    if not path:
        raise ConfigError(
            f"ranks that meet over TCP need a common secret: make one with {REMEDY}, copy it to every host, "
            f"and name it in {SECRET_VARIABLE}"
        )
    try:
        with open_regular(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(4097).strip()
    except OSError as error:
        raise ConfigError(f"the job secret {path} cannot be read: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"the job secret {path} can be read by others (mode {stat.S_IMODE(mode):o}): chmod 600 it")
    if not MIN_SECRET <= len(secret) <= 4096:
        raise ConfigError(
            f"the job secret {path} has {len(secret)} bytes; {MIN_SECRET} to 4096 are needed: make one with {REMEDY}"
        )
    return secret


def job_secret(world: World) -> bytes:
    """The secret that all ranks of `world` hold. A collective call.

    In a world without one, rank 0 draws it. Ranks of several hosts agree on it without sending it in clear.
    """
    known = getattr(world, "secret", None)
    if known or len(set(world.hosts)) == 1:
        return known or world.broadcast(secrets.token_bytes(32) if world.rank == 0 else None)
    from ckdist.comm.bootstrap.sealed_messages import agreed_secret

    return agreed_secret(world)


def receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Reads `size` bytes. Raises CommError if the connection ends or the deadline (time.monotonic) passes."""
    data = bytearray()
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise CommError(f"a peer sent {len(data)} of {size} bytes in time")
        connection.settimeout(left)
        try:
            part = connection.recv(size - len(data))
        except TimeoutError:
            continue
        except OSError as error:
            raise CommError(f"a peer's connection broke: {error.strerror}") from None
        if not part:
            raise CommError("a peer closed its connection")
        data += part
    return bytes(data)


def _proof(secret: bytes, role: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.new(secret, role + client + server, hashlib.sha256).digest()


def _keys(secret: bytes, client: bytes, server: bytes, is_client: bool) -> bytes:
    """The keys of one end of a sealed connection."""
    to_server, to_client = (_proof(secret, role, client, server)[:16] for role in (b"to server", b"to client"))
    return to_server + to_client if is_client else to_client + to_server


def _hello(purpose: Purpose, sealed: bool) -> bytes:
    ends = purpose.source, purpose.target, purpose.lane
    return _HELLO.pack(_MAGIC, secrets.token_bytes(32), sealed, purpose.kind, *ends)


def _flag(sealed: bool) -> str:
    return f"with{'out' if sealed else ''} --encrypt never"


def connect(
    address: tuple[str, int],
    purpose: Purpose,
    secret: bytes,
    timeout: float,
    source: str = "",
    sealed: bool = False,
    once: bool = False,
) -> Joined:
    """Returns an authenticated connection to the listener at `address`. It retries until the listener has room.

    Raises CommError after `timeout` seconds, or if the peer fails the handshake. With `once`, it does not retry, and
    raises the OSError of a failed connection.
    """
    deadline, there = time.monotonic() + timeout, f"rank {purpose.target} at {address[0]}:{address[1]}"
    client = _hello(purpose, sealed)
    while True:
        try:
            connection = socket.create_connection(
                address, timeout=max(0.1, deadline - time.monotonic()), source_address=(source, 0) if source else None
            )
        except OSError as error:
            problem = error
        else:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(client)
                server = receive_exactly(connection, _HELLO.size, deadline)
                break
            except (CommError, OSError) as error:  # the listener closed it to make room, or is not ready yet
                connection.close()
                problem = error
        if once:
            raise problem
        if time.monotonic() > deadline:
            raise CommError(
                f"{there} does not answer within {timeout:.0f} s ({problem}): is it started, and is the port open?"
            ) from None
        time.sleep(_AGAIN_SECONDS)
    try:
        if server[: len(_MAGIC)] != _MAGIC or server[_PURPOSE:] != client[_PURPOSE:]:
            raise CommError(f"{there} is not rank {purpose.target} of this job")
        if server[_PURPOSE - 1] != sealed:
            raise CommError(f"{there} was started {_flag(not sealed)}, and this rank {_flag(sealed)}")
        connection.sendall(_proof(secret, b"client", client, server))
        try:
            proof = receive_exactly(connection, _PROOF_BYTES, deadline)
        except CommError:
            proof = b""
        if not hmac.compare_digest(proof, _proof(secret, b"server", client, server)):
            raise CommError(f"{there} does not know this job's secret: give all ranks the same one")
    except (CommError, OSError) as error:
        connection.close()
        raise CommError(f"rank {purpose.source} could not join rank {purpose.target}: {error}") from None
    connection.settimeout(None)
    return Joined(connection, _keys(secret, client, server, is_client=True) if sealed else b"")


class Listener:
    """Accepts connections at one address and hands out the authenticated ones by purpose.

    Other connections are dropped. The first _DROPPED_LINES of them are logged.

    Args:
        address: Address to listen at.
        port: 0: any free port.
        patience: Seconds until a client must have proved itself.
        log: Receives the lines.
        sealed: The connections are encrypted.

    Raises:
        ConfigError: It cannot listen there.
    """

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        secret: bytes,
        patience: float = 10.0,
        log: Log | None = None,
        sealed: bool = False,
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.rank, self.secret, self.patience, self.log, self.sealed = rank, secret, patience, log, sealed
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((address, port))
        except OSError as error:
            self.socket.close()
            raise ConfigError(
                f"rank {rank} cannot listen at {address}:{port}: {error.strerror}; choose another address or port"
            ) from None
        self.socket.listen(512)
        self.address = self.socket.getsockname()[:2]
        self._proven: dict[Purpose, Joined] = {}
        self._changed = threading.Condition()
        self._strangers: collections.OrderedDict[socket.socket, None] = collections.OrderedDict()  # oldest first
        self._dropped = 0
        self._closed = False
        threading.Thread(target=self._accept, daemon=True, name="ckdist-listener").start()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self.socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_AGAIN_SECONDS)  # no file descriptor is left, or the peer is gone already
                continue
            with self._changed:
                self._strangers[connection] = None
                oldest = self._strangers.popitem(last=False)[0] if len(self._strangers) > _STRANGERS else None
            if oldest is not None:
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # ends its thread
            threading.Thread(target=self._authenticate, args=(connection, peer), daemon=True).start()

    def _authenticate(self, connection: socket.socket, peer: tuple[Any, ...]) -> None:
        """Runs in a thread per connection. Keeps the connection once it is authenticated, else drops it."""
        try:
            begun = time.monotonic()
            client = receive_exactly(connection, _HELLO.size, begun + min(_FIRST_SECONDS, self.patience))
            magic, _, sealed, kind, source, target, lane = _HELLO.unpack(client)
            if magic != _MAGIC:
                raise CommError("it is not a rank of a job")
            server = _HELLO.pack(_MAGIC, secrets.token_bytes(32), self.sealed, kind, source, self.rank, lane)
            connection.settimeout(self.patience)
            connection.sendall(server)
            if sealed != self.sealed:
                raise CommError(f"it was started {_flag(sealed)}, and this rank {_flag(self.sealed)}")
            proof = receive_exactly(connection, _PROOF_BYTES, begun + self.patience)
            if not hmac.compare_digest(proof, _proof(self.secret, b"client", client, server)) or target != self.rank:
                raise CommError("it does not know this job's secret")
            with self._changed:
                if connection not in self._strangers:
                    raise CommError("it was closed to make room")
                del self._strangers[connection]
            connection.sendall(_proof(self.secret, b"server", client, server))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(None)
            with self._changed:
                purpose = Purpose(kind, source, target, lane)
                if self._closed or purpose in self._proven:
                    raise CommError("a rank came twice")
                keys = _keys(self.secret, client, server, is_client=False) if sealed else b""
                self._proven[purpose] = Joined(connection, keys)
                self._changed.notify_all()
        except (CommError, OSError) as error:
            connection.close()
            self._log_dropped(f"dropped a connection from {peer[0]}: {error}")
        finally:
            with self._changed:
                self._strangers.pop(connection, None)

    def _log_dropped(self, line: str) -> None:
        with self._changed:
            self._dropped += 1
            count = self._dropped
        if self.log and count <= _DROPPED_LINES:
            self.log(line if count < _DROPPED_LINES else f"{line}; further ones are not logged")

    def take(self, purpose: Purpose, deadline: float) -> Joined:
        """Waits for the connection of `purpose`. Raises CommError at `deadline` (time.monotonic)."""
        with self._changed:
            while purpose not in self._proven:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise CommError(
                        f"rank {purpose.source} did not join rank {self.rank} in time: "
                        "is it started with the same address, port and job secret?"
                    )
                self._changed.wait(left)
            return self._proven.pop(purpose)

    def take_any(self, deadline: float) -> tuple[Purpose, Joined] | None:
        """Returns the first connection of any purpose, or None at `deadline` (time.monotonic)."""
        with self._changed:
            while not self._proven:
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    return None
                self._changed.wait(left)
            return self._proven.popitem()

    def close(self) -> None:
        """Stops listening and closes the connections that were not taken."""
        with self._changed:
            self._closed = True
            for joined in self._proven.values():
                joined.socket.close()
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
