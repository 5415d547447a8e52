"""Machines as the kernel would describe them, written as small files below a folder: what /sys and /proc hold on real
layouts.

The numbering of CPUs, distances and sizes follow what such machines show: hardware threads after all cores on Intel and
AMD servers, interleaved with their siblings on hybrid clients.
"""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field

GIB = 1 << 30
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


@contextlib.contextmanager
def folder_in_memory() -> Iterator[pathlib.Path]:
    """A folder in memory. On a disk, the thousands of small files of a large machine take seconds of CPU time: ext4
    does not use the numbers of files that were deleted in the last seconds, and searches for others.
    """
    with tempfile.TemporaryDirectory(prefix="machine-tree-", dir=MEMORY) as name:
        yield pathlib.Path(name)


def listed(numbers) -> str:
    """A kernel list without ranges."""
    return ",".join(map(str, sorted(numbers)))


@dataclass
class Layout:
    """One machine.

    `cores` of each package, divided evenly into `clusters` nodes; `l3_cores` share an L3 (0: those of the package).
    """

    packages: int = 1
    clusters: int = 1
    cores: int = 4
    smt: int = 1
    l3_cores: int = 0
    near: int = 12  # distances: inside a package,
    far: int = 21  # and between packages
    vendor: str = "GenuineIntel"
    flags: str = "fpu avx2 fma f16c bmi2"
    memory_only: tuple[int, ...] = ()  # distance of each node without CPUs to all others
    offline: tuple[int, ...] = ()
    allowed: str | None = None
    memory_nodes: str | None = None
    nodes: bool = True
    node_bytes: int = 64 * GIB
    extra: dict[str, str] = field(default_factory=dict)  # files written last

    def write(self, root: pathlib.Path) -> pathlib.Path:
        """Writes the machine's files below `root`, which it returns."""
        self.files = {}
        total = self.packages * self.cores
        online = [n for n in range(total * self.smt) if n not in self.offline]
        siblings = {n: [m for m in online if m % total == n % total] for n in online}
        for n in online:
            core = n % total
            package = core // self.cores
            share = self.l3_cores or self.cores
            l3 = [m for m in online if m % total // share == core // share]
            folder = f"sys/devices/system/cpu/cpu{n}"
            self.files[f"{folder}/topology/physical_package_id"] = package
            self.files[f"{folder}/topology/thread_siblings_list"] = listed(siblings[n])
            for index, (level, size, shared) in enumerate(
                [(1, "32K", siblings[n]), (2, "2048K", siblings[n]), (3, "32768K", l3)]
            ):
                self.files[f"{folder}/cache/index{index}/level"] = level
                self.files[f"{folder}/cache/index{index}/type"] = "Data" if level == 1 else "Unified"
                self.files[f"{folder}/cache/index{index}/size"] = size
                self.files[f"{folder}/cache/index{index}/shared_cpu_list"] = listed(shared)
        everyone = f"0-{total * self.smt - 1}"
        self.files |= {
            "sys/devices/system/cpu/online": listed(online),
            "sys/devices/system/cpu/present": everyone,
            "sys/devices/system/cpu/offline": listed(self.offline),
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            "proc/cpuinfo": f"processor\t: 0\nvendor_id\t: {self.vendor}\nmodel name\t: A CPU\n"
            f"flags\t\t: {self.flags}\n",
            "proc/meminfo": f"MemTotal: {total * 16 << 20} kB\nMemAvailable: {total * 12 << 20} kB\n"
            "SwapTotal: 0 kB\nSwapFree: 0 kB\n",
            "proc/self/status": f"Name:\tx\nCpus_allowed_list:\t{self.allowed or listed(online)}\n"
            + (f"Mems_allowed_list:\t{self.memory_nodes}\n" if self.memory_nodes else ""),
        }
        if self.nodes:
            self._write_nodes(online, total)
        files = {os.path.join(root, path): text for path, text in (self.files | self.extra).items()}
        for folder in {os.path.dirname(path) for path in files}:
            os.makedirs(folder, exist_ok=True)
        for path, text in files.items():
            with open(path, "w", buffering=1 << 12) as file:
                file.write(f"{text}\n")
        return root

    def _write_nodes(self, online: list[int], total: int) -> None:
        each = self.cores // self.clusters
        with_cpus = self.packages * self.clusters
        count = with_cpus + len(self.memory_only)
        self.files["sys/devices/system/node/online"] = f"0-{count - 1}" if count > 1 else "0"
        for node in range(count):
            folder = f"sys/devices/system/node/node{node}"
            self.files[f"{folder}/cpulist"] = (
                listed(n for n in online if n % total // each == node) if node < with_cpus else ""
            )
            self.files[f"{folder}/distance"] = " ".join(
                str(self._distance(node, other, with_cpus)) for other in range(count)
            )
            kilobytes = self.node_bytes >> 10
            self.files[f"{folder}/meminfo"] = (
                f"Node {node} MemTotal:       {kilobytes} kB\nNode {node} MemFree:        {kilobytes // 2} kB"
            )
            for size in (2048, 1048576):
                for name in ("nr_hugepages", "free_hugepages"):
                    self.files[f"{folder}/hugepages/hugepages-{size}kB/{name}"] = 0

    def _distance(self, a: int, b: int, with_cpus: int) -> int:
        if a == b:
            return 10
        if max(a, b) >= with_cpus:
            return self.memory_only[max(a, b) - with_cpus]
        return self.near if a // self.clusters == b // self.clusters else self.far


AMX = "fpu avx2 fma f16c bmi2 avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8"

# name -> (layout, nodes with CPUs, clusters, cluster name, physical cores)
LAYOUTS = {
    "one socket": (Layout(cores=16, smt=2), 1, 1, "", 16),
    "two sockets": (Layout(packages=2, cores=28, smt=2, flags=AMX), 2, 1, "", 56),
    "four sockets": (Layout(packages=4, cores=24, smt=2), 4, 1, "", 96),
    "SNC-2": (Layout(packages=2, clusters=2, cores=32, smt=2), 4, 2, "SNC-2", 64),
    "SNC-4": (Layout(packages=2, clusters=4, cores=56, smt=2, near=12, flags=AMX), 8, 4, "SNC-4", 112),
    "NPS-4": (
        Layout(packages=2, clusters=4, cores=64, smt=2, l3_cores=8, far=32, vendor="AuthenticAMD"),
        8,
        4,
        "NPS-4",
        128,
    ),
    "L3 as NUMA": (
        Layout(clusters=8, cores=64, smt=2, l3_cores=8, near=11, vendor="AuthenticAMD"),
        8,
        8,
        "L3 as NUMA",
        64,
    ),
    "memory node": (Layout(packages=2, cores=16, memory_only=(14, 24)), 2, 1, "", 32),
    "offline cores": (Layout(packages=2, cores=8, smt=2, offline=(1, 2, 3, 17, 24)), 2, 1, "", 15),
    "no nodes": (Layout(packages=2, cores=8, nodes=False), 1, 1, "", 16),
}


def hybrid() -> Layout:
    """Six fast cores of two threads each (CPUs 0 to 11, siblings side by side), eight efficient ones in clusters of
    four.
    """
    extra = {"sys/devices/cpu_core/cpus": "0-11", "sys/devices/cpu_atom/cpus": "12-19"}
    for n in range(12):
        extra[f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list"] = f"{n // 2 * 2}-{n // 2 * 2 + 1}"
    for n in range(12, 20):
        extra[f"sys/devices/system/cpu/cpu{n}/cache/index1/shared_cpu_list"] = f"{n // 4 * 4}-{n // 4 * 4 + 3}"
    return Layout(cores=20, extra=extra)
