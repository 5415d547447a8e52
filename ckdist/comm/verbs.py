"""RDMA devices as the kernel lists them, which of their addresses to use, and the native verbs transport opened between ranks.

Devices are read from sysfs, so they can be shown where libibverbs is missing; what moves bytes is native (`comm/verbs.h`).
"""

import ipaddress
import pathlib
import socket
from dataclasses import dataclass

import numpy as np

from ckdist import native
from ckdist.errors import ConfigError, EngineError

ROCE_V2, ROCE_V1, INFINIBAND = "RoCE v2", "RoCE v1", "InfiniBand"
PREFERENCE = {ROCE_V2: 0, INFINIBAND: 1, ROCE_V1: 2}  # version 1 does not leave its Ethernet segment


@dataclass(frozen=True)
class Gid:
    """One entry of a port's table: a RoCE version with the address and interface that it stands for."""

    index: int
    version: str
    address: str  # IPv4 where the entry stands for one, else IPv6
    interface: str


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device. `rate` as the driver says it; `numa_node` is -1 where it is not known."""

    device: str
    number: int
    active: bool
    rate: str
    numa_node: int
    gids: tuple[Gid, ...]


@dataclass(frozen=True)
class Choice:
    """The port and table entry that a rank uses."""

    device: str
    port: int
    gid: Gid

    def __str__(self):
        return f"{self.device} port {self.port}, GID {self.gid.index} ({self.gid.version}, {self.gid.address})"


def _read(path: pathlib.Path, default: str = "") -> str:
    try:
        return path.read_text().strip()
    except OSError:  # an empty table entry is a file that cannot be read
        return default


def devices(root: str = "/") -> tuple[Port, ...]:
    """All ports of all RDMA devices, in the order of their names."""
    found = []
    for device in sorted(pathlib.Path(root, "sys/class/infiniband").glob("*")):
        node = _read(device / "device/numa_node", "-1")
        for port in sorted(device.glob("ports/*")):
            gids = tuple(_gids(port, _read(port / "link_layer") == INFINIBAND))
            active = _read(port / "state").endswith("ACTIVE")  # "4: ACTIVE"
            found.append(Port(device.name, int(port.name), active, _read(port / "rate"), int(node), gids))
    return tuple(found)


def _gids(port: pathlib.Path, infiniband: bool):
    for entry in sorted(port.glob("gids/*"), key=lambda path: int(path.name)):
        gid = ipaddress.IPv6Address(_read(entry, "::") or "::")
        if int(gid) & (2**64 - 1) == 0:
            continue
        attributes = port / "gid_attrs"
        version = INFINIBAND if infiniband else _read(attributes / "types" / entry.name).replace("IB/", "")
        yield Gid(int(entry.name), version, str(gid.ipv4_mapped or gid), _read(attributes / "ndevs" / entry.name))


def choose(ports: tuple[Port, ...], interface: str | None = None, peer: str | None = None, numa_node: int = -1) -> Choice:
    """The best entry among active ports: of `interface` (its name, its address, or an RDMA device's name) where one is named, else
    of the address that routes to `peer`, else near `numa_node`; RoCE v2 before InfiniBand before RoCE v1, IPv4 before IPv6.

    ConfigError when there is none, with what there is.
    """
    wanted = interface or (source_address(peer) if peer else None)
    candidates = [
        (PREFERENCE.get(gid.version, 3), gid.address.count(":") > 0, port.numa_node != numa_node, port.device, port.number, gid.index, gid)
        for port in ports
        if port.active
        for gid in port.gids
        if wanted in (None, gid.address, gid.interface, port.device)
    ]
    if candidates:
        *_, device, number, _, gid = min(candidates, key=lambda c: c[:-1])
        return Choice(device, number, gid)
    if not ports:
        raise ConfigError("this machine has no RDMA device")
    have = ", ".join(f"{p.device} ({'active' if p.active else 'down'}: {', '.join(sorted({g.address for g in p.gids})) or 'no address'})" for p in ports)
    raise ConfigError(f"no active RDMA port has the address or interface {wanted}; there is {have}" if wanted else f"no RDMA port is active; there is {have}")


def source_address(peer: str) -> str:
    """This host's IPv4 address from which packets to `peer` leave; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))
            return probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"no route leads to {peer}: {error}") from None


def available(interface: str | None = None, root: str = "/") -> tuple[bool, str]:
    """Can this process use verbs? With the device that it would use, or the reason why not, in one line."""
    try:
        native.check(native.lib.ckdist_verbs_available())
        return True, str(choose(devices(root), interface))
    except (ConfigError, EngineError) as error:
        return False, str(error)


class Transport:
    """Messages and one-sided windows between the ranks of a world over verbs. One thread uses it at a time.

    `exchange`: gives this rank's bytes to all and returns all ranks' in rank order (a world's `gather`). Buffers are C-contiguous
    numpy arrays; waiting operations raise CommError, naming the peer, after `timeout` seconds or when it is known to be gone.
    """

    def __init__(self, choice: Choice, rank: int, size: int, exchange, timeout: float):
        self.rank, self.size = rank, size
        out = native.ffi.new("struct ckdist_verbs **")
        native.check(native.lib.ckdist_verbs_open(choice.device.encode(), choice.port, choice.gid.index, rank, size, timeout, out))
        self.handle = native.ffi.gc(out[0], native.lib.ckdist_verbs_free)
        bytes_each = native.lib.ckdist_verbs_address_bytes(size)
        own = np.zeros(bytes_each, np.uint8)
        native.check(native.lib.ckdist_verbs_address(self.handle, native.pointer(own, "uint8_t *")))
        addresses = exchange(own.tobytes())
        if len(addresses) != size or any(len(a) != bytes_each for a in addresses):
            raise ConfigError(f"the ranks' verbs addresses are not {size} of {bytes_each} bytes: start all ranks with the same version")
        native.check(native.lib.ckdist_verbs_connect(self.handle, b"".join(addresses)))
        exchange(b"")  # nobody writes before all are connected

    def isend(self, peer: int, tag: int, data: np.ndarray) -> int:
        return self._begin(native.lib.ckdist_verbs_isend, peer, tag, native.pointer(data), data.nbytes)

    def irecv(self, peer: int, tag: int, data: np.ndarray) -> int:
        return self._begin(native.lib.ckdist_verbs_irecv, peer, tag, native.pointer(data), data.nbytes)

    def iput(self, peer: int, window: int, offset: int, data: np.ndarray) -> int:
        return self._begin(native.lib.ckdist_verbs_iput, peer, window, offset, native.pointer(data), data.nbytes)

    def iget(self, peer: int, window: int, offset: int, data: np.ndarray) -> int:
        return self._begin(native.lib.ckdist_verbs_iget, peer, window, offset, native.pointer(data), data.nbytes)

    def inotify(self, peer: int, window: int, slot: int) -> int:
        return self._begin(native.lib.ckdist_verbs_inotify, peer, window, slot)

    def notified(self, window: int, slot: int) -> int:
        count = native.ffi.new("uint64_t *")
        native.check(native.lib.ckdist_verbs_notified(self.handle, window, slot, count))
        return count[0]

    def register(self, data: np.ndarray) -> None:
        native.check(native.lib.ckdist_verbs_register(self.handle, native.pointer(data), data.nbytes))

    def expose(self, window: int, data: np.ndarray) -> None:
        native.check(native.lib.ckdist_verbs_expose(self.handle, window, native.pointer(data), data.nbytes))

    def wait(self, request: int, peer: int, what: str = "wait") -> None:
        native.check(native.lib.ckdist_verbs_wait(self.handle, request, peer, what.encode()))

    def send(self, peer: int, tag: int, data: np.ndarray) -> None:
        self.wait(self.isend(peer, tag, data), peer, "send")

    def recv(self, peer: int, tag: int, data: np.ndarray) -> np.ndarray:
        self.wait(self.irecv(peer, tag, data), peer, "recv")
        return data

    def abandon(self, reason: str) -> None:
        native.check(native.lib.ckdist_verbs_abandon(self.handle, reason.encode()))

    def close(self) -> None:
        native.ffi.release(self.handle)

    def _begin(self, call, *arguments) -> int:
        request = native.ffi.new("uint64_t *")
        native.check(call(self.handle, *arguments, request))
        return request[0]
