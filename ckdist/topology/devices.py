"""RDMA ports and DSA work queues, with their NUMA nodes. They are read from sysfs; no device is opened."""

from dataclasses import dataclass

from ckdist.topology.tree import Tree


@dataclass(frozen=True)
class RdmaPort:
    """One port of an RDMA device. `node` is None if not known."""

    device: str
    port: int
    node: int | None
    state: str  # ACTIVE, DOWN, ...
    link: str  # Ethernet (RoCE) or InfiniBand
    rate: str


@dataclass(frozen=True)
class DsaQueue:
    """One work queue of an Intel Data Streaming Accelerator. Programs can use enabled queues of kind user."""

    name: str
    node: int | None
    state: str  # enabled, disabled
    mode: str  # shared, dedicated
    kind: str  # user, kernel, none
    size: int | None  # capacity in descriptors
    max_transfer: int | None  # bytes per descriptor
    max_batch: int | None  # descriptors per batch; None: no batches
    block_on_fault: bool  # the device may wait for missing pages


@dataclass(frozen=True)
class DsaDevice:
    """An Intel Data Streaming Accelerator. `shared_memory`: it uses the virtual addresses of a process."""

    name: str
    node: int | None
    state: str
    shared_memory: bool
    queues: tuple[DsaQueue, ...]


def _count(tree: Tree, path: str) -> int | None:
    number = tree.number(path)
    return number if number is not None and number >= 0 else None


def read_rdma(tree: Tree) -> tuple[RdmaPort, ...]:
    """The ports of all RDMA devices."""
    ports = []
    for device in tree.names("sys/class/infiniband"):
        folder = f"sys/class/infiniband/{device}"
        node = _count(tree, f"{folder}/device/numa_node")
        for port in map(int, filter(str.isdecimal, tree.names(f"{folder}/ports"))):
            state, link, rate = (
                tree.text(f"{folder}/ports/{port}/{name}")[:40] for name in ("state", "link_layer", "rate")
            )
            ports.append(RdmaPort(device, port, node, state.rpartition(":")[2].strip(), link, rate))
    return tuple(ports)


def read_dsa(tree: Tree) -> tuple[DsaDevice, ...]:
    """The accelerators of the idxd driver, with their queues."""
    bus = "sys/bus/dsa/devices"
    devices = []
    for number in tree.numbered(bus, "dsa"):  # other devices of the driver (iax) do not copy
        folder = f"{bus}/dsa{number}"
        node = _count(tree, f"{folder}/numa_node")
        queues = tuple(
            _dsa_queue(tree, bus, f"wq{number}.{queue}", node) for queue in tree.numbered(bus, f"wq{number}.")
        )
        devices.append(
            DsaDevice(
                f"dsa{number}",
                node,
                tree.text(f"{folder}/state")[:40],
                tree.number(f"{folder}/pasid_enabled") == 1,
                queues,
            )
        )
    return tuple(devices)


def _dsa_queue(tree: Tree, bus: str, name: str, node: int | None) -> DsaQueue:
    word = lambda what: tree.text(f"{bus}/{name}/{what}")[:40]
    number = lambda what: _count(tree, f"{bus}/{name}/{what}")
    return DsaQueue(
        name,
        node,
        word("state"),
        word("mode"),
        word("type"),
        number("size"),
        number("max_transfer_size"),
        number("max_batch_size"),
        number("block_on_fault") == 1,
    )
