"""RDMA ports and DSA work queues, with the NUMA node that each hangs on. Read from sysfs; nothing is opened."""

import re
from dataclasses import dataclass

from ckdist.topology.tree import Tree


@dataclass(frozen=True)
class RdmaPort:
    """One port of an RDMA device. `node` is None where the kernel does not say."""

    device: str
    port: int
    node: int | None
    state: str  # ACTIVE, DOWN, ...
    link: str  # Ethernet (RoCE) or InfiniBand
    rate: str


@dataclass(frozen=True)
class DsaQueue:
    """One work queue of an Intel Data Streaming Accelerator."""

    name: str
    node: int | None
    state: str  # enabled, disabled
    mode: str  # shared, dedicated
    kind: str  # user, kernel, none


def _node(tree: Tree, path: str) -> int | None:
    number = tree.number(path)
    return number if number is not None and number >= 0 else None


def read_rdma(tree: Tree) -> tuple[RdmaPort, ...]:
    ports = []
    for device in tree.names("sys/class/infiniband"):
        folder = f"sys/class/infiniband/{device}"
        node = _node(tree, f"{folder}/device/numa_node")
        for port in map(int, filter(str.isdecimal, tree.names(f"{folder}/ports"))):
            word = lambda name: tree.text(f"{folder}/ports/{port}/{name}")[:40]
            ports.append(RdmaPort(device, port, node, word("state").rpartition(":")[2].strip(), word("link_layer"), word("rate")))
    return tuple(ports)


def read_dsa(tree: Tree) -> tuple[DsaQueue, ...]:
    queues = []
    for name in tree.names("sys/bus/dsa/devices"):
        match = re.fullmatch(r"wq(\d{1,4})\.\d{1,4}", name, re.ASCII)
        if match:
            word = lambda what: tree.text(f"sys/bus/dsa/devices/{name}/{what}")[:40]
            node = _node(tree, f"sys/bus/dsa/devices/dsa{match[1]}/numa_node")
            queues.append(DsaQueue(name, node, word("state"), word("mode"), word("type")))
    return tuple(queues)
