"""RDMA ports with their NUMA nodes. They are read from sysfs; no device is opened."""

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


def read_rdma(tree: Tree) -> tuple[RdmaPort, ...]:
    """The ports of all RDMA devices."""
    ports = []
    for device in tree.names("sys/class/infiniband"):
        folder = f"sys/class/infiniband/{device}"
        node = tree.number(f"{folder}/device/numa_node")
        node = None if node == -1 else node
        for port in map(int, filter(str.isdecimal, tree.names(f"{folder}/ports"))):
            state, link, rate = (
                tree.text(f"{folder}/ports/{port}/{name}")[:40] for name in ("state", "link_layer", "rate")
            )
            ports.append(RdmaPort(device, port, node, state.rpartition(":")[2].strip(), link, rate))
    return tuple(ports)
