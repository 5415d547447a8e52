"""Two ends of a TCP connection prove to one another that they belong to the same job, and say what the connection is for.

Both hold the job's secret; each proves it by an HMAC-SHA256 over both ends' fresh nonces and over what was said, with its own
role in it, so nothing can be replayed or reflected. It authenticates; it does not encrypt what follows.
"""

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

from ckdist.errors import CommError, ConfigError

SECRET_VARIABLE = "CKDIST_JOB_SECRET_FILE"
MIN_SECRET = 16
_MAGIC = b"ckdist1\n"
_HELLO = struct.Struct("!8s32s4sIII")  # magic, nonce, purpose, from, to, lane
_PROOF_BYTES = hashlib.sha256().digest_size
_STRANGERS = 64  # connections that are being looked at, at once


@dataclass(frozen=True)
class Purpose:
    """What a connection is for: `kind` (four letters), the ranks at its ends, and its number among several alike."""

    kind: bytes
    source: int
    target: int
    lane: int = 0


def read_secret(path: str | None = None) -> bytes:
    """The job's secret from a file that is its owner's alone; `path` defaults to what CKDIST_JOB_SECRET_FILE names."""
    path = path or os.environ.get(SECRET_VARIABLE)
    if not path:
        raise ConfigError(f"ranks that meet over TCP need a common secret: put {MIN_SECRET} or more random bytes in a file on every host and name it in {SECRET_VARIABLE}")
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(4097).strip()
    except OSError as error:
        raise ConfigError(f"the job secret {path} cannot be read: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"the job secret {path} can be read by others (mode {stat.S_IMODE(mode):o}): chmod 600 it")
    if not MIN_SECRET <= len(secret) <= 4096:
        raise ConfigError(f"the job secret {path} has {len(secret)} bytes; {MIN_SECRET} to 4096 are needed")
    return secret


def receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    """`size` bytes, or CommError when the connection ends or the deadline (time.monotonic) passes."""
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


def _hello(purpose: Purpose) -> bytes:
    return _HELLO.pack(_MAGIC, secrets.token_bytes(32), purpose.kind, purpose.source, purpose.target, purpose.lane)


def connect(address: tuple[str, int], purpose: Purpose, secret: bytes, timeout: float, source: str = "") -> socket.socket:
    """A proven connection to who listens at `address`, tried again until it listens. CommError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            connection = socket.create_connection(address, timeout=max(0.1, deadline - time.monotonic()), source_address=(source, 0) if source else None)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise CommError(f"rank {purpose.target} at {address[0]}:{address[1]} does not answer within {timeout:.0f} s ({error}): is it started, and is the port open?") from None
            time.sleep(0.05)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _hello(purpose)
        connection.sendall(client)
        server = receive_exactly(connection, _HELLO.size, deadline)
        proof = receive_exactly(connection, _PROOF_BYTES, deadline)
        if not hmac.compare_digest(proof, _proof(secret, b"server", client, server)) or server[40:] != client[40:]:
            raise CommError(f"rank {purpose.target} at {address[0]}:{address[1]} does not know this job's secret: give all ranks the same one")
        connection.sendall(_proof(secret, b"client", client, server))
        if receive_exactly(connection, 1, deadline) != b"+":
            raise CommError(f"rank {purpose.target} at {address[0]}:{address[1]} refused the connection")
    except CommError as error:
        connection.close()
        raise CommError(f"rank {purpose.source} could not join rank {purpose.target} at {address[0]}:{address[1]}: {error}; is the job secret the same on all hosts?") from None
    except OSError as error:
        connection.close()
        raise CommError(f"rank {purpose.source} could not join rank {purpose.target} at {address[0]}:{address[1]}: {error.strerror}") from None
    connection.settimeout(None)
    return connection


class Listener:
    """Takes connections on one address and hands out those that proved themselves, by purpose; strangers are dropped with one line."""

    def __init__(self, address: str, port: int, rank: int, secret: bytes, patience: float = 10.0, log=None):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.rank, self.secret, self.patience, self.log = rank, secret, patience, log
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((address, port))
        except OSError as error:
            self.socket.close()
            raise ConfigError(f"rank {rank} cannot listen at {address}:{port}: {error.strerror}; choose another address or port") from None
        self.socket.listen(512)
        self.address = self.socket.getsockname()[:2]
        self._proven: dict[Purpose, socket.socket] = {}
        self._changed = threading.Condition()
        self._slots = threading.Semaphore(_STRANGERS)
        self._closed = False
        threading.Thread(target=self._accept, daemon=True, name="ckdist-listener").start()

    def _accept(self) -> None:
        while True:
            self._slots.acquire()
            try:
                connection, peer = self.socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._meet, args=(connection, peer), daemon=True).start()

    def _meet(self, connection: socket.socket, peer) -> None:
        try:
            deadline = time.monotonic() + self.patience
            client = receive_exactly(connection, _HELLO.size, deadline)
            magic, _, kind, source, target, lane = _HELLO.unpack(client)
            if magic != _MAGIC or target != self.rank:
                raise CommError("it does not speak to this rank of a job")
            server = _HELLO.pack(_MAGIC, secrets.token_bytes(32), kind, source, target, lane)
            connection.settimeout(self.patience)
            connection.sendall(server + _proof(self.secret, b"server", client, server))
            if not hmac.compare_digest(receive_exactly(connection, _PROOF_BYTES, deadline), _proof(self.secret, b"client", client, server)):
                raise CommError("it does not know this job's secret")
            connection.sendall(b"+")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(None)
            with self._changed:
                purpose = Purpose(kind, source, target, lane)
                if self._closed or purpose in self._proven:
                    raise CommError("a rank came twice")
                self._proven[purpose] = connection
                self._changed.notify_all()
        except (CommError, OSError) as error:
            connection.close()
            if self.log:
                self.log(f"dropped a connection from {peer[0]}: {error}")
        finally:
            self._slots.release()

    def take(self, purpose: Purpose, deadline: float) -> socket.socket:
        """The connection for `purpose`, waited for until `deadline` (time.monotonic)."""
        with self._changed:
            while purpose not in self._proven:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise CommError(f"rank {purpose.source} did not join rank {self.rank} in time: is it started with the same address, port and job secret?")
                self._changed.wait(left)
            return self._proven.pop(purpose)

    def take_any(self, deadline: float) -> tuple[Purpose, socket.socket] | None:
        """Whichever connection comes first, with its purpose; None when none came until `deadline` (time.monotonic)."""
        with self._changed:
            while not self._proven:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
            return self._proven.popitem()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for connection in self._proven.values():
                connection.close()
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.socket.close()
