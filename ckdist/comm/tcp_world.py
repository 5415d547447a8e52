"""The ranks of a job that was started without MPI: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them.

Rank 0 listens at the master's address; the others connect to it and prove the job's secret (`handshake`). What is exchanged
here is small msgpack at start-up, with capped sizes; the traffic of every step goes elsewhere. Who shares a host is found
out by the host's boot, so LOCAL_RANK is not needed.
"""

import fcntl
import os
import socket
import struct
import time

import msgpack

from ckdist.comm.handshake import Listener, Purpose, connect, read_secret, receive_exactly
from ckdist.comm.world import _host_name
from ckdist.errors import CommError, ConfigError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
INTERFACE_VARIABLE = "CKDIST_INTERFACE"
MAX_RANKS = 256
MAX_MESSAGE = 64 << 20
_SIOCGIFADDR = 0x8915


def is_started() -> bool:
    """Did a torchrun-style launcher start this process?"""
    return all(os.environ.get(name) for name in VARIABLES)


def address_of(interface: str) -> str:
    """The address of a network interface (`eth0`), or the address itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
        except OSError:
            pass
    try:
        return socket.getaddrinfo(interface, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(f"{interface!r} is neither an interface nor an address of this host, which has {names}") from None


def _environment() -> tuple[int, int, str, int]:
    values = {name: os.environ.get(name, "") for name in VARIABLES}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not values[name].isdigit() or len(values[name]) > 6:
            raise ConfigError(f"{name} ({values[name]!r}) must be a whole number")
    return int(values["RANK"]), int(values["WORLD_SIZE"]), values["MASTER_ADDR"], int(values["MASTER_PORT"])


class TcpWorld:
    """A job's ranks over TCP; the interface of MpiWorld."""

    def __init__(self, rank: int, size: int, master: str, port: int, secret: bytes, interface: str | None = None, timeout: float = 120.0, host: str | None = None, log=None):
        if not 0 < size <= MAX_RANKS or not 0 <= rank < size:
            raise ConfigError(f"RANK ({rank}) of WORLD_SIZE ({size}) is not possible: ranks count from 0, and at most {MAX_RANKS} are supported")
        if not 0 < port < 65536:
            raise ConfigError(f"MASTER_PORT ({port}) must be from 1 to 65535")
        self.rank, self.size, self.secret, self.timeout = rank, size, secret, timeout
        deadline = time.monotonic() + timeout
        own = address_of(interface) if interface else ""
        self._peers: dict[int, socket.socket] = {}
        if rank == 0:
            listener = Listener(own or socket.gethostbyname(master), port, 0, secret, log=log)
            try:
                for source in range(1, size):
                    self._peers[source] = listener.take(Purpose(b"boot", source, 0), deadline)
            finally:
                listener.close()
            self.address = listener.address[0]
        else:
            self._peers[0] = connect((master, port), Purpose(b"boot", rank, 0), secret, timeout, own)
            self.address = self._peers[0].getsockname()[0]
        self.hosts = tuple(self.gather(host or _host_name()))
        same = [r for r, name in enumerate(self.hosts) if name == self.hosts[rank]]
        self.local_rank, self.local_size = same.index(rank), len(same)

    @classmethod
    def from_environment(cls, log=None) -> "TcpWorld":
        """The world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, with the secret that CKDIST_JOB_SECRET_FILE names."""
        return cls(*_environment(), read_secret(), os.environ.get(INTERFACE_VARIABLE), log=log)

    def broadcast(self, value=None):
        """Rank 0's msgpack-able value, on every rank."""
        if self.rank == 0:
            for peer in self._peers:
                self._send(peer, value)
            return value
        return self._receive(0)

    def gather_all(self, value) -> list:
        """Every rank's msgpack-able value, on every rank, in rank order."""
        if self.rank == 0:
            return self.broadcast([value] + [self._receive(peer) for peer in range(1, self.size)])
        self._send(0, value)
        values = self._receive(0)
        if not isinstance(values, list) or len(values) != self.size:
            raise CommError(f"rank 0 sent something other than the values of {self.size} ranks: start all ranks with the same version")
        return values

    gather = gather_all

    def close(self) -> None:
        for connection in self._peers.values():
            connection.close()

    def _send(self, peer: int, value) -> None:
        data = msgpack.packb(value)
        if len(data) > MAX_MESSAGE:
            raise CommError(f"a start-up message of {len(data)} bytes; at most {MAX_MESSAGE} can be sent")
        try:
            self._peers[peer].settimeout(self.timeout)
            self._peers[peer].sendall(struct.pack("!I", len(data)) + data)
        except OSError as error:
            raise CommError(f"rank {peer} was lost at start-up: {error}") from None

    def _receive(self, peer: int):
        deadline = time.monotonic() + self.timeout
        try:
            (size,) = struct.unpack("!I", receive_exactly(self._peers[peer], 4, deadline))
            if size > MAX_MESSAGE:
                raise CommError(f"it announced {size} bytes, and at most {MAX_MESSAGE} are taken")
            return msgpack.unpackb(receive_exactly(self._peers[peer], size, deadline), strict_map_key=False)
        except CommError as error:
            raise CommError(f"rank {peer} was lost at start-up: {error}") from None
        except (ValueError, msgpack.UnpackException):
            raise CommError(f"rank {peer} sent something that is not msgpack at start-up") from None
