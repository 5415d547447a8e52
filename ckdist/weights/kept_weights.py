"""A rank's packed weights, which stay in memory between the end of the rank and its next start.

The process that restarts ranks holds the ends of a pair of sockets for each of them (`ckdist/launcher/keeper.py`). A
rank sends the descriptor of its arena into the pair, where nobody reads it. The message keeps the memory alive until
the next rank receives it, or until the last end closes.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import socket
from typing import TYPE_CHECKING

import msgspec

from ckdist import native
from ckdist.comm.agreement import build_digests
from ckdist.comm.bootstrap.launched_world import inherited
from ckdist.comm.bootstrap.launchers import KEPT_VARIABLE
from ckdist.comm.world_protocol import World
from ckdist.errors import ConfigError

if TYPE_CHECKING:
    from ckdist.weights.loader import ShardLoader

MAX_MESSAGE = 1024  # bytes

log = logging.getLogger(__name__)


class Header(msgspec.Struct, array_like=True):
    """Describes an arena. `digest`: of all that decides its bytes. `comparison`: as `KeptWeights.comparison`."""

    digest: str
    bytes: int
    comparison: str = ""


def inherited_weights() -> "KeptWeights | None":
    """The kept weights of this rank. None in a process that did not inherit the sockets, or has taken them."""
    with contextlib.suppress(ConfigError):
        ends = inherited(os.environ.pop(KEPT_VARIABLE))
        return KeptWeights(ends[0], ends[1])
    return None


class KeptWeights:
    """The weights of the last start, and the place where this start leaves its own.

    Attributes:
        path: Of the arena of the last start; "" if there is none that suits.
        comparison: Random name of the start that compared the weights with those of other hosts; "" if none has.
    """

    def __init__(self, reading: socket.socket, writing: socket.socket) -> None:
        self._reading, self._writing = reading, writing
        reading.setblocking(False)
        writing.setblocking(False)
        self.path = self.comparison = ""
        self._digest = ""
        self._fd = -1

    def find(self, loader: "ShardLoader") -> int:
        """Finds the arena that the last start left. Frees one that does not suit. Returns its bytes, 0 for none."""
        self._digest = plan_digest(loader)
        header, fd = self._receive()
        if header is None or fd < 0:
            return 0
        size = os.fstat(fd).st_size
        if not self._digest or header.digest != self._digest or header.bytes != loader.planned_bytes or size <= 0:
            os.close(fd)
            log.warning("kept weights are of another model, build or division: the weights are packed again")
            return 0
        self._fd, self.comparison = fd, header.comparison
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self._send(loader.planned_bytes)
        return min(os.fstat(fd).st_blocks * 512, size)

    def hand_over(self, loader: "ShardLoader", packed: int) -> None:
        """Leaves the arena of an open loader to the next start, unless `find` has. `packed`: bytes found packed."""
        if self.path:
            log.info("%.2f GB of packed weights were kept from the last start", packed / 1e9)
        elif self._digest and self._digest == plan_digest(loader):
            self._fd = int(loader.path.rpartition("/")[2])
            self._send(loader.planned_bytes)

    def compared(self, world: World) -> None:
        """Records that all hosts have the same weights. A collective call."""
        self.comparison = world.gather(secrets.token_hex(16))[0]
        header, fd = self._receive()
        if header is not None and fd >= 0:
            os.close(fd)
            self._send(header.bytes)

    def _send(self, size: int) -> None:
        message = msgspec.msgpack.encode(Header(self._digest, size, self.comparison))
        # A full socket is no error: the next start packs again.
        with contextlib.suppress(OSError):
            socket.send_fds(self._writing, [message], [self._fd])

    def _receive(self) -> tuple[Header | None, int]:
        """Takes the message out of the sockets: (its header, its descriptor); (None, -1) if there is no valid one."""
        found: tuple[Header | None, int] = (None, -1)
        while True:
            try:
                data, fds, *_ = socket.recv_fds(self._reading, MAX_MESSAGE, 1)
            except OSError:
                return found
            if found[1] >= 0:
                os.close(found[1])
            found = (None, -1)
            try:
                found = (msgspec.msgpack.decode(data, type=Header), fds[0])
            except (msgspec.MsgspecError, IndexError):
                for fd in fds:
                    os.close(fd)
                log.warning("kept weights have an invalid header: the weights are packed again")


def plan_digest(loader: "ShardLoader") -> str:
    """Digest of all that decides the bytes of a loader's arena. "" if a file has changed since it was opened."""
    stamps = [(path, _identity(stat)) for path, stat in loader.stamps.items()]
    try:
        if stamps != [(path, _identity(path.stat())) for path in loader.stamps]:
            return ""
    except OSError:
        return ""
    whole = hashlib.sha256(repr((build_digests(), native.isa(), loader.planned_bytes, stamps)).encode())
    for part in loader.planned:
        whole.update(repr(part).encode())
    return whole.hexdigest()


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
