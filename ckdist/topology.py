"""Where this process may run: its CPUs and their NUMA nodes, and how a host's ranks share them."""

import os
import pathlib
from dataclasses import dataclass

SYSTEM = pathlib.Path("/sys/devices/system")


@dataclass(frozen=True)
class Placement:
    """One rank's place. `cpus`: one per thread, or empty where the threads outnumber the CPUs and are left to the kernel.

    `bound` says that a launcher's binding was in force and was kept.
    """

    cpus: tuple[int, ...]
    node: int
    bound: bool
    crowded: bool


def parse_cpu_list(text: str) -> list[int]:
    """The CPUs of a kernel list such as "0-3,8"."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def node_of_cpu(cpu: int, system: pathlib.Path = SYSTEM) -> int:
    """The NUMA node of a CPU; 0 where the kernel does not say."""
    for node in sorted(system.glob("node/node[0-9]*")):
        try:
            if cpu in parse_cpu_list((node / "cpulist").read_text()):
                return int(node.name[4:])
        except OSError:
            pass
    return 0


def physical_first(cpus: list[int], system: pathlib.Path = SYSTEM) -> list[int]:
    """`cpus` with one hardware thread of every core before any second one."""

    def place(cpu: int) -> tuple[int, int]:
        try:
            siblings = parse_cpu_list((system / f"cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            return 0, cpu
        return sorted(siblings).index(cpu) if cpu in siblings else 0, cpu

    return sorted(cpus, key=place)


def core_count(cpus: list[int], system: pathlib.Path = SYSTEM) -> int:
    """How many physical cores `cpus` lie on."""
    cores = set()
    for cpu in cpus:
        try:
            cores.add((system / f"cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def place(local_rank: int, local_size: int, threads: int | None, allowed: list[int] | None = None, online: int | None = None) -> Placement:
    """The CPUs of one of `local_size` ranks on this host.

    A binding that the launcher made (fewer CPUs allowed than online) is kept; otherwise the allowed CPUs are divided in
    order, which divides them by node. `threads` None: one per physical core of the share.
    """
    allowed = sorted(os.sched_getaffinity(0)) if allowed is None else allowed
    online = os.cpu_count() or len(allowed) if online is None else online
    bound = local_size > 1 and len(allowed) < online
    if bound or local_size == 1:
        share = allowed
    else:
        ordered = sorted(allowed, key=lambda c: (node_of_cpu(c), c))
        share = ordered[len(ordered) * local_rank // local_size : len(ordered) * (local_rank + 1) // local_size]
        share = share or [ordered[local_rank % len(ordered)]]
    wanted = threads or max(1, core_count(share))
    crowded = wanted > len(share) or (not bound and local_size > len(allowed))
    cpus = () if crowded else tuple(physical_first(share)[:wanted])
    return Placement(cpus, node_of_cpu(share[0]), bound, crowded)


def default_threads(local_size: int) -> int:
    """Threads of a rank that was not told: its share of the physical cores."""
    allowed = sorted(os.sched_getaffinity(0))
    bound = local_size > 1 and len(allowed) < (os.cpu_count() or 1)
    return max(1, core_count(allowed) if bound else core_count(allowed) // local_size)
