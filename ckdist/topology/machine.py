"""One machine as the kernel describes it."""

import functools
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckdist import native
from ckdist.topology.binding import Binding, own_cpus, read_binding
from ckdist.topology.control_group import ControlGroup, read_control_group
from ckdist.topology.cpu_model import model_name
from ckdist.topology.cpus import Cpu, cache_bytes, offline_cpus, read_cpus
from ckdist.topology.memory import Memory, Node, read_memory, read_nodes
from ckdist.topology.tree import Tree

if TYPE_CHECKING:  # few processes look at the devices
    from ckdist.topology.devices import RdmaPort

# CPU features that kernels could use, by their names in /proc/cpuinfo (x86 `flags`, ARM `Features`).
FEATURES = [
    "avx2", "fma", "f16c", "bmi2", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "avx512vbmi", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16",
    "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme",
]  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """One machine.

    Attributes:
        nodes: NUMA nodes. One node with all CPUs if the kernel shows none.
        simple: A note if the NUMA nodes are not reliable; else empty.
    """

    model: str
    vendor: str
    cpus: tuple[Cpu, ...]
    offline: tuple[int, ...]
    nodes: tuple[Node, ...]
    l2_bytes: int  # size of one L2 cache
    l3_bytes: int  # size of one L3 cache
    features: tuple[str, ...]
    amx: str  # granted, refused, absent
    memory: Memory
    control_group: ControlGroup
    binding: Binding
    simple: str
    tree: Tree = field(repr=False, compare=False)

    @functools.cached_property
    def rdma(self) -> "tuple[RdmaPort, ...]":
        """The ports of all RDMA devices."""
        from ckdist.topology.devices import read_rdma

        return read_rdma(self.tree)

    @functools.cached_property
    def by_number(self) -> dict[int, Cpu]:
        """CPUs by number."""
        return {cpu.number: cpu for cpu in self.cpus}

    @functools.cached_property
    def packages(self) -> tuple[int, ...]:
        """The packages (sockets) with CPUs, ascending."""
        return tuple(sorted({cpu.package for cpu in self.cpus}))

    def nodes_in_use(self) -> int:
        """The number of NUMA nodes with CPUs that this process may use, at least 1."""
        usable = set(self.binding.cpus)
        return max(1, sum(bool(usable & set(node.cpus)) for node in self.nodes))

    def cores(self, cpus: Collection[int] | None = None) -> tuple[int, ...]:
        """The physical cores of `cpus`; None: of all CPUs."""
        return tuple(sorted({cpu.core for cpu in self.cpus if cpus is None or cpu.number in cpus}))

    def caches(self, cpus: Collection[int]) -> list[int]:
        """The last-level cache of each of `cpus`; -1 if it is not known."""
        return [self.by_number[cpu].l3 if cpu in self.by_number else -1 for cpu in cpus]

    def package_of(self, node: int) -> int | None:
        """The package of a node's CPUs; None if it has no CPUs, or CPUs of several packages."""
        packages = {cpu.package for cpu in self.cpus if cpu.node == node}
        return packages.pop() if len(packages) == 1 else None

    @functools.cached_property
    def clusters(self) -> int:
        """NUMA nodes per package: 1 unless sub-NUMA clustering (SNC, NPS) is on."""
        whole = [self.package_of(node.number) for node in self.nodes if node.cpus]
        return max((whole.count(package) for package in self.packages), default=1) or 1

    @property
    def cluster_name(self) -> str:
        """SNC-2, NPS-4 or L3 as NUMA; "" without sub-NUMA clusters."""
        if self.clusters < 2:
            return ""
        if self.vendor == "GenuineIntel":
            return f"SNC-{self.clusters}"
        domains = {(cpu.node, cpu.l3) for cpu in self.cpus}
        each_its_own = len({l3 for _, l3 in domains}) == len(domains) == len({node for node, _ in domains})
        return "L3 as NUMA" if self.clusters > 4 and each_its_own else f"NPS-{self.clusters}"

    def distance(self, a: int, b: int) -> int:
        """The distance of two nodes in the firmware's tables; 10 is local. If it is missing: 10 if equal, else 20."""
        node = next((node for node in self.nodes if node.number == a), None)
        return (node.distances if node else {}).get(b, 10 if a == b else 20)


def read_machine(
    root: str | os.PathLike[str] = "/",
    environment: Mapping[str, str] | None = None,
    cpus: tuple[int, ...] | None = None,
) -> Machine:
    """Reads the machine below `root`. `cpus`: allowed CPUs; None: those in the status file.

    It never fails because of the contents of a file.
    """
    tree = Tree(root)
    binding = read_binding(tree, os.environ if environment is None else environment, cpus)
    nodes = read_nodes(tree)
    node_of = {cpu: node.number for node in nodes for cpu in node.cpus}
    online = read_cpus(tree, node_of, binding.cpus)
    memory = read_memory(tree)
    with_cpus = [node for node in nodes if node.cpus]
    simple = ""
    if not with_cpus:
        simple = f"this kernel shows no NUMA nodes: the ranks of a host divide its {len(online)} CPUs in order"
        nodes = (Node(0, tuple(cpu.number for cpu in online), memory.total, memory.available, {0: 10}, ()),)
    elif any(cpu.number not in node_of for cpu in online):
        strays = sum(cpu.number not in node_of for cpu in online)
        node = with_cpus[0].number
        simple = f"{strays} of {len(online)} CPUs are on no NUMA node: they are taken to be on node {node}"
        online = tuple(cpu if cpu.number in node_of else Cpu(**{**vars(cpu), "node": node}) for cpu in online)
    elif len(with_cpus) == 1 and len({cpu.package for cpu in online}) > 1:
        simple = (
            f"{len({cpu.package for cpu in online})} packages show one NUMA node: "
            "node interleaving is on in the firmware, and memory cannot be local"
        )
    first = online[0].number if online else 0
    rows = tree.text("proc/cpuinfo").split("\n\n")[0]
    about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in rows.splitlines())}
    words = set((about.get("flags") or about.get("Features") or "").split())
    return Machine(
        model=model_name(about),
        vendor=about.get("vendor_id", "")[:20],
        cpus=online,
        offline=offline_cpus(tree),
        nodes=nodes,
        l2_bytes=cache_bytes(tree, first, 2),
        l3_bytes=cache_bytes(tree, first, 3),
        features=tuple(name for name in FEATURES if name in words),
        amx=_amx() if "amx_tile" in words else "absent",
        memory=memory,
        control_group=read_control_group(tree),
        binding=binding,
        simple=simple,
        tree=tree,
    )


def _amx() -> str:
    return {1: "granted", 0: "absent"}.get(native.lib.ckdist_request_amx(), "refused")


@functools.lru_cache(maxsize=1)
def this_machine() -> Machine:
    """The machine of this process, read once."""
    return read_machine("/", cpus=own_cpus())
