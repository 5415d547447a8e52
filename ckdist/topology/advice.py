"""Finds settings that make a machine slower, with the command that changes each. It changes no settings itself."""

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass

from ckdist.topology.machine import Machine
from ckdist.topology.tree import Tree, format_cpu_list

SLEEPY = ("powersave", "conservative", "ondemand", "userspace")  # governors that raise clocks late


@dataclass(frozen=True)
class Advice:
    """A `finding` about the machine, its effect (`why`), and the `command` that changes it, usually as root."""

    finding: str
    why: str
    command: str


def advise(machine: Machine, root: str | os.PathLike[str] = "/", memlock: int | None = None) -> tuple[Advice, ...]:
    """Advice for `machine`, which was read below `root`. `memlock` is a limit in bytes; None: that of this process."""
    tree = Tree(root)
    if memlock is None:
        memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return (*_memory(tree, machine, memlock), *_cpus(tree, machine), *_limits(machine), *_nodes(tree, machine))


def _memory(tree: Tree, machine: Machine, memlock: int) -> Iterator[Advice]:
    if machine.memory.transparent == "never":
        yield Advice(
            "transparent huge pages are off",
            "each 4 KiB page of the weights needs its own TLB entry",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    defrag = tree.text("sys/kernel/mm/transparent_hugepage/defrag")
    if machine.memory.transparent in ("always", "madvise") and "[never]" in defrag:
        yield Advice(
            "the kernel never compacts memory for huge pages",
            "fragmented memory stays in 4 KiB pages",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/defrag",
        )
    if tree.number("proc/sys/vm/overcommit_memory") == 2:
        yield Advice(
            "memory is not overcommitted (vm.overcommit_memory 2)",
            "large weights may be refused though memory is free",
            "sudo sysctl -w vm.overcommit_memory=0",
        )
    if machine.memory.swap_used > 64 << 20:
        yield Advice(
            f"{machine.memory.swap_used >> 20} MiB are swapped out",
            "weights that are swapped out stall every token",
            "sudo swapoff -a && sudo swapon -a; sudo sysctl -w vm.swappiness=1",
        )
    if machine.rdma and 0 <= memlock < machine.memory.total // 2:
        yield Advice(
            f"this user may lock {memlock >> 10} KiB of memory",
            "RDMA needs weights and buffers locked",
            "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/ckdist.conf  # then log in again",
        )


def _cpus(tree: Tree, machine: Machine) -> Iterator[Advice]:
    governors = {tree.text(f"sys/devices/system/cpu/cpu{cpu.number}/cpufreq/scaling_governor") for cpu in machine.cpus}
    for governor in sorted(governors & set(SLEEPY)):
        yield Advice(
            f"the CPU governor is {governor}",
            "clocks rise late when work comes in bursts",
            "sudo cpupower frequency-set -g performance",
        )
    if machine.offline:
        commands = "for c in " + " ".join(map(str, machine.offline[:8])) + (" ..." if len(machine.offline) > 8 else "")
        yield Advice(
            f"CPUs {format_cpu_list(machine.offline)} are switched off",
            "their cores do no work",
            f"{commands}; do echo 1 | sudo tee /sys/devices/system/cpu/cpu$c/online; done",
        )
    if machine.amx == "refused":
        yield Advice(
            "the CPU has AMX, but the kernel refuses its tiles",
            "matrix products run on AVX-512 instead",
            "uname -r  # Linux 5.16 or newer supports AMX",
        )


def _limits(machine: Machine) -> Iterator[Advice]:
    group, allowed = machine.control_group, machine.binding.cpus
    if group.quota is not None and group.quota < len(machine.cores(allowed)):
        yield Advice(
            f"a control group gives {group.quota:.1f} CPUs' worth of time to {len(machine.cores(allowed))} cores",
            "only that number of threads runs, unpinned, and the other cores stay idle",
            f"docker update --cpus {len(machine.cores(allowed))} CONTAINER  # or systemctl set-property UNIT CPUQuota=",
        )
    if group.memory is not None and machine.memory.total and group.memory < machine.memory.total * 0.9:
        yield Advice(
            f"a control group limits memory to {group.memory / 2**30:.1f} of {machine.memory.total / 2**30:.1f} GiB",
            "larger models are refused",
            "docker update --memory SIZE --memory-swap SIZE CONTAINER  # or systemctl set-property UNIT MemoryMax=SIZE",
        )
    for node in machine.nodes:
        mine = set(node.cpus) & set(allowed)
        if mine and len(machine.cores(mine)) < len(machine.cores(node.cpus)) and not machine.binding.launcher:
            yield Advice(
                f"{len(machine.cores(mine))} of {len(machine.cores(node.cpus))} cores "
                f"of node {node.number} may be used",
                "its ranks are slower than others, and the slowest sets the pace",
                "docker update --cpuset-cpus 0-N CONTAINER  # or taskset, numactl: whole nodes",
            )


def _nodes(tree: Tree, machine: Machine) -> Iterator[Advice]:
    own = [node for node in machine.nodes if node.cpus]
    if machine.simple and len(machine.packages) > 1:
        yield Advice(
            machine.simple.partition(":")[0],
            "half of all reads cross to another socket",
            "# firmware setup: Node Interleaving (or NUMA) = NUMA enabled",
        )
    if len(own) > 1:
        kind = f"{machine.cluster_name}: " if machine.cluster_name else ""
        yield Advice(
            f"{kind}memory is in {len(own)} nodes",
            "one rank on each node reads local memory",
            f"ckdist serve -tp {len(own)}",
        )
        if tree.number("proc/sys/kernel/numa_balancing"):
            yield Advice(
                "automatic NUMA balancing is on",
                "it unmaps pages to find out which CPUs use them",
                "sudo sysctl -w kernel.numa_balancing=0",
            )
    if machine.binding.memory_policy not in ("default", "local", "unknown"):
        yield Advice(
            f"numactl set the memory policy {machine.binding.memory_policy}",
            "ckdist then binds no memory itself",
            "start without numactl --membind or --interleave",
        )
