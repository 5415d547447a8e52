"""RDMA devices, the choice of a port and address, and the native verbs transport between ranks.

Devices are read from sysfs, so they can be shown if libibverbs is missing. Native code moves the bytes
(`native/comm/transports/verbs.h`).
"""

import ipaddress
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ckdist import native
from ckdist.comm.bootstrap.sockets import HEARTBEATS, connect_ranks
from ckdist.comm.world_protocol import World
from ckdist.errors import CkdistError, ConfigError
from ckdist.native import CData
from ckdist.topology import this_machine
from ckdist.topology.binding import own_cpus
from ckdist.topology.devices import RdmaPort, read_rdma
from ckdist.topology.tree import Tree

ROCE_V2, ROCE_V1, INFINIBAND = "RoCE v2", "RoCE v1", "InfiniBand"
TRY_SECONDS = 1.0
_NO_INTERFACE = re.compile(r"|.*(:0000){4}")  # no entry, or only a prefix
START_TAG = 0  # below the tags of channels
PREFERENCE = {ROCE_V2: 0, INFINIBAND: 1, ROCE_V1: 2}  # version 1 does not leave its Ethernet segment


@dataclass(frozen=True)
class Gid:
    """One entry of a port's GID table: a RoCE version with its address and interface."""

    index: int
    version: str
    address: str  # IPv4 if the entry maps one, else IPv6
    interface: str


@dataclass(frozen=True)
class Port(RdmaPort):
    """One port of an RDMA device, with its addresses."""

    gids: tuple[Gid, ...]


@dataclass(frozen=True)
class Choice:
    """The port and GID that a rank uses."""

    device: str
    port: int
    gid: Gid

    def __str__(self) -> str:
        return f"{self.device} port {self.port}, GID {self.gid.index} ({self.gid.version}, {self.gid.address})"


def devices(root: str = "/") -> tuple[Port, ...]:
    """All ports of all RDMA devices, ordered by name."""
    tree = Tree(root)
    return tuple(Port(**vars(port), gids=tuple(_gids(tree, port))) for port in read_rdma(tree))


def _gids(tree: Tree, port: RdmaPort) -> Iterator[Gid]:
    """The entries of a port's GID table that have an address. A table may have a thousand entries, nearly all empty."""
    folder = f"sys/class/infiniband/{port.device}/ports/{port.port}"
    for index in tree.numbered(f"{folder}/gids", ""):
        text = tree.text(f"{folder}/gids/{index}")
        if _NO_INTERFACE.fullmatch(text):
            continue
        gid = ipaddress.IPv6Address(text)
        kind = tree.text(f"{folder}/gid_attrs/types/{index}").replace("IB/", "")
        version = INFINIBAND if port.link == INFINIBAND else kind
        yield Gid(index, version, str(gid.ipv4_mapped or gid), tree.text(f"{folder}/gid_attrs/ndevs/{index}"))


def choose(ports: tuple[Port, ...], interface: str | None = None, numa_node: int | None = None) -> Choice:
    """Chooses the best GID among active ports: RoCE v2 before InfiniBand before RoCE v1, IPv4 before IPv6.

    Args:
        ports: All ports.
        interface: Name or address of a network interface, or name of an RDMA device, that the GID must belong to.
        numa_node: Ports near this node are preferred.

    Raises:
        ConfigError: There is no such port. The error lists the ports.
    """
    candidates = [
        (
            PREFERENCE.get(gid.version, 3),
            gid.address.count(":") > 0,
            port.node != numa_node,
            port.device,
            port.port,
            gid.index,
            gid,
        )
        for port in ports
        if port.state == "ACTIVE"
        for gid in port.gids
        if interface in (None, gid.address, gid.interface, port.device)
    ]
    if candidates:
        *_, device, number, _, gid = min(candidates, key=lambda c: c[:-1])
        return Choice(device, number, gid)
    if not ports:
        raise ConfigError("this machine has no RDMA device")
    have = ", ".join(
        f"{p.device} ({'active' if p.state == 'ACTIVE' else 'down'}: "
        f"{', '.join(sorted({g.address for g in p.gids})) or 'no address'})"
        for p in ports
    )
    raise ConfigError(
        f"no active RDMA port has the address or interface {interface}; there is {have}"
        if interface
        else f"no RDMA port is active; there is {have}"
    )


def own_choice(interface: str | None = None) -> Choice:
    """The port and GID that this process would use.

    Raises ConfigError if the library, the headers at build time or an active port are missing.
    """
    native.check(native.lib.ckdist_verbs_available())
    mine = own_cpus()
    nodes = {cpu.node for cpu in this_machine().cpus if cpu.number in mine}
    return choose(devices(), interface, numa_node=nodes.pop() if len(nodes) == 1 else None)


def verbs_works(interface: str | None = None) -> tuple[bool, str]:
    """Tests whether the port that this process would use carries data.

    Two queue pairs on it are connected to each other, and one writes to the other's memory.

    Returns:
        (True, the port), or (False, the reason in one line).
    """
    try:
        choice = own_choice(interface)
        native.check(native.lib.ckdist_verbs_try(choice.device.encode(), choice.port, choice.gid.index, TRY_SECONDS))
        return True, str(choice)
    except CkdistError as error:
        return False, str(error)


def open_verbs(world: World, interface: str | None = None, timeout: float = 30.0) -> CData:
    """Opens the native verbs transport (struct ckdist_transport *) between all ranks. A collective call.

    It is tested with one message around the ring of ranks. `interface`: name or address of a network interface, or name
    of an RDMA device; default: an active port near this rank's NUMA node. Raises ConfigError on all ranks if it does
    not work on some rank.
    """
    transport: VerbsTransport | None = None
    choice = why = ""

    def agreed(step: Callable[[], None]) -> None:
        """Runs one step on every rank. Raises ConfigError on all of them if any rank failed."""
        nonlocal why
        try:
            step()
        except CkdistError as error:
            why = str(error)
        for rank, (other, used) in enumerate(world.gather([why, choice])):
            if other:
                raise ConfigError(
                    f"verbs does not work on rank {rank} "
                    f"({world.hosts[rank].split('/')[0]}{', ' + used if used else ''}): {other}"
                )

    def open_port() -> None:
        """Opens this rank's port."""
        nonlocal transport, choice
        chosen = own_choice(interface)
        choice = str(chosen)
        transport = VerbsTransport(chosen, world.rank, world.size, timeout)

    agreed(open_port)
    opened = transport
    assert opened is not None  # otherwise `agreed` has raised
    addresses = world.gather(opened.address())

    def around() -> None:
        """Sends to the next rank and receives from the previous one. Finds a firewall between connected ranks."""
        after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        if world.size > 1:
            sending = opened.isend(after, START_TAG, np.ones(1, np.uint8))
            opened.wait(opened.irecv(before, START_TAG, np.empty(1, np.uint8)), before, "start-up")
            opened.wait(sending, after, "start-up")

    agreed(lambda: opened.connect(addresses))
    agreed(around)
    (heartbeats,) = connect_ranks(world, None, [HEARTBEATS])
    return native.new(native.lib.ckdist_transport_verbs, opened.handle, heartbeats.descriptors, heartbeats.keys or None)


class VerbsTransport:
    """Messages between ranks over verbs. One thread uses it at a time.

    Every rank opens one, sends its `address` to all others by a world's `gather`, and calls `connect` with all
    addresses. All ranks must have connected before any uses it. Buffers are C-contiguous numpy arrays that live until
    the operation is complete. A wait raises CommError, which names the peer, after `timeout` seconds or if the peer is
    known to be gone.

    Args:
        choice: The port and GID.
        timeout: Longest wait, in seconds.

    Raises:
        CommError: The device cannot be opened.
    """

    def __init__(self, choice: Choice, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        where = [choice.device, choice.port, choice.gid.index]
        self.handle = native.new(native.lib.ckdist_verbs_open, *where, rank, size, timeout)

    def address(self) -> bytes:
        """The bytes that the other ranks need to connect."""
        own = np.zeros(native.lib.ckdist_verbs_address_bytes(self.size), np.uint8)
        native.check(native.lib.ckdist_verbs_address(self.handle, native.pointer(own, "uint8_t *")))
        return own.tobytes()

    def connect(self, addresses: list[bytes]) -> None:
        """Connects to all ranks, by their `address` in rank order. Raises ConfigError if these are of another build."""
        bytes_each = native.lib.ckdist_verbs_address_bytes(self.size)
        if len(addresses) != self.size or any(len(a) != bytes_each for a in addresses):
            raise ConfigError(
                f"the ranks' verbs addresses are not {self.size} of {bytes_each} bytes: "
                "start all ranks with the same version"
            )
        native.check(native.lib.ckdist_verbs_connect(self.handle, b"".join(addresses)))

    def isend(self, peer: int, tag: int, data: np.ndarray) -> int:
        """Starts to send `data` to `peer`. Returns a request for `wait`."""
        return self._begin(native.lib.ckdist_verbs_isend, peer, tag, native.pointer(data), data.nbytes)

    def irecv(self, peer: int, tag: int, data: np.ndarray) -> int:
        """Starts to receive a message of exactly `data`'s size from `peer`. Returns a request for `wait`."""
        return self._begin(native.lib.ckdist_verbs_irecv, peer, tag, native.pointer(data), data.nbytes)

    def wait(self, request: int, peer: int, what: str = "wait") -> None:
        """Blocks until `request` is complete. Raises CommError if `peer` is lost or late."""
        native.check(native.lib.ckdist_verbs_wait(self.handle, request, peer, what.encode()))

    def _begin(self, call: Callable[..., int], *arguments: object) -> int:
        """Makes a native call that starts a request, and returns the request's number."""
        return native.call(call, self.handle, *arguments)
