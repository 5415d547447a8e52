"""Assigns CPUs and memory nodes to each rank of a host.

Ranks are divided evenly over nodes, and the cores of a node evenly over its ranks. A rank keeps CPUs that its launcher
gave to it only; ranks with the same CPUs divide them. `bind_memory` applies the result to memory.
"""

import contextlib
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ckdist import native
from ckdist.comm.world_protocol import World
from ckdist.topology.binding import own_cpus
from ckdist.topology.machine import Machine, this_machine

Item = TypeVar("Item")

FRONT_END_CORES = 8  # rank 0 leaves one core to the front end if its share has at least this number of cores


@dataclass(frozen=True)
class Placement:
    """The placement of one rank.

    Attributes:
        cpus: CPUs to pin threads to, one per thread. Empty: no pinning, because threads outnumber CPUs, or there is a
            quota (other containers use the same CPUs then).
        share: All CPUs of this rank.
        nodes: Nodes of these CPUs.
        memory: Nodes for its pages. Empty: no binding.
        sharers: Number of ranks with memory on these nodes, including this one.
        bound: The binding of a launcher was kept.
        crowded: Threads outnumber CPUs, or ranks share CPUs.
        note: One line about a placement that could be better, or "".
        threads: Number of threads that run at once.
        quota: CPUs of time that a control group gives this rank, if that is less than its cores; else None.
    """

    cpus: tuple[int, ...]
    share: tuple[int, ...]
    nodes: tuple[int, ...]
    memory: tuple[int, ...]
    sharers: int
    bound: bool
    crowded: bool
    note: str
    threads: int = 0
    quota: float | None = None

    @property
    def is_over_quota(self) -> bool:
        """True if there are more threads than the quota allows, so that the kernel stops them during steps."""
        return self.quota is not None and self.threads > max(1, int(self.quota))

    @property
    def node(self) -> int:
        """The first of its nodes."""
        return self.nodes[0] if self.nodes else 0

    def enter(self) -> None:
        """Restricts this thread, and threads that it starts later, to the share.

        Memory that they touch first is then local, even if the kernel refuses to bind memory.
        """
        if self.share != own_cpus():
            with contextlib.suppress(OSError):  # a CPU went offline meanwhile: leave the choice to the kernel
                os.sched_setaffinity(0, self.share)


def place(world: World, threads: int | None = None) -> Placement:
    """The placement of this rank for `threads` threads (None: `default_threads`). A collective call."""
    masks = _masks(world)
    machine, quota = this_machine(), quota_of(world)
    wanted = threads or threads_of(machine, shares(machine, masks)[world.local_rank], world.rank == 0, quota)
    return place_rank(machine, masks, world.local_rank, wanted, quota)


def default_threads(world: World, wanted: int = 0) -> int:
    """`wanted` threads, or one per fast physical core of the share, within the quota. A collective call for either."""
    machine, quota, masks = this_machine(), quota_of(world), _masks(world)
    return wanted or threads_of(machine, shares(machine, masks)[world.local_rank], world.rank == 0, quota)


def _of_host(world: World, own: Any) -> list[Any]:
    """Gathers `own` from each rank of this host, in local rank order. A collective call."""
    return [one for one, host in zip(world.gather(own), world.hosts, strict=True) if host == world.hosts[world.rank]]


def _masks(world: World) -> list[tuple[int, ...]]:
    """The CPUs that each rank of this host may use, in local rank order."""
    return [tuple(mask) for mask in _of_host(world, list(own_cpus()))]


def quota_of(world: World) -> float | None:
    """CPUs of time that control groups give this rank; None: no limit. A collective call."""
    quotas = this_machine().control_group.quotas
    return shared_quota(quotas, _of_host(world, [group for group, _ in quotas]))


def shared_quota(quotas: Iterable[tuple[str, float]], groups: Sequence[Sequence[str]]) -> float | None:
    """The smallest part of a quota that this rank has. The ranks in a group have equal parts of its quota.

    Args:
        quotas: This rank's groups with their quotas.
        groups: For each rank of the host: its groups with a quota.
    """
    return min((cpus / sum(group in others for others in groups) for group, cpus in quotas), default=None)


def threads_of(machine: Machine, share: tuple[int, ...], front_end: bool, quota: float | None = None) -> int:
    """One thread per fast physical core, less one for the front end, and not more than the quota.

    Work is divided evenly over threads, so a thread on an efficient core would slow down all. Efficient cores stay idle
    unless a share has only these.
    """
    cores = {cpu.core for cpu in machine.cpus if cpu.number in share and not cpu.efficient} or set(machine.cores(share))
    threads = max(1, len(cores) - (front_end and len(cores) >= FRONT_END_CORES))
    return threads if quota is None else min(threads, max(1, int(quota)))


def place_rank(
    machine: Machine, masks: list[tuple[int, ...]], local_rank: int, threads: int, quota: float | None = None
) -> Placement:
    """The placement of one rank of a host. `masks`: the CPUs that each rank may use. `quota`: that of this rank."""
    everyone = shares(machine, masks)
    share = everyone[local_rank]
    bound = len(set(masks)) > 1
    overlap = any(set(share) & set(other) for rank, other in enumerate(everyone) if rank != local_rank)
    crowded = overlap or threads > len(share)
    nodes = _nodes(machine, share)
    memory = _memory(machine, nodes)
    sharers = sum(bool(set(memory) & set(_memory(machine, _nodes(machine, other)))) for other in everyone)
    cores = len(machine.cores(share))
    if quota is not None and quota >= cores:
        quota = None
    cpus = () if crowded or quota is not None else tuple(threads_first(machine, share)[:threads])
    note = _note(machine, masks, everyone) if quota is None else quota_note(quota, cores, threads)
    return Placement(cpus, share, nodes, memory, max(1, sharers), bound, crowded, note, threads, quota)


def quota_note(quota: float, cores: int, threads: int) -> str:
    """Describes how a quota limits a rank's threads, with a warning if the rank has more."""
    count = f"{threads} thread{'s' * (threads > 1)}"
    of_rank = f"a control group limits a rank to {quota:.3g} CPUs of time on {cores} cores"
    if threads > max(1, int(quota)):
        return f"{of_rank}: its {count} will be stopped in the middle of steps; -t {max(1, int(quota))} avoids it"
    return f"{of_rank}, so it has {count}"


def shares(machine: Machine, masks: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The CPUs of each rank, ascending. Ranks with equal masks divide them; any other rank keeps its mask."""
    result: list[tuple[int, ...]] = [()] * len(masks)
    for mask in dict.fromkeys(masks):
        ranks = [rank for rank, other in enumerate(masks) if other == mask]
        for rank, share in zip(ranks, _divide(machine, mask, len(ranks)), strict=True):
            result[rank] = tuple(sorted(share))
    return result


def _divide(machine: Machine, mask: tuple[int, ...], ranks: int) -> list[list[int]]:
    """Divides the CPUs of a mask into one share per rank: by nodes first, then by cores."""
    if ranks == 1 or len(mask) < ranks:
        return [list(mask)] * ranks
    nodes: dict[int, list[int]] = {}
    for cpu in sorted(mask, key=lambda n: (_package(machine, n), _node(machine, n), n)):
        nodes.setdefault(_node(machine, cpu), []).append(cpu)
    cpus = list(nodes.values())
    if ranks < len(cpus):
        return [list(itertools.chain(*part)) for part in _cuts(cpus, ranks)]
    cores = [len(machine.cores(group)) for group in cpus]
    if sum(cores) < ranks:  # divide hardware threads instead
        cores = [len(group) for group in cpus]
    counts = ranks_per_node(cores, ranks)
    return [share for group, count in zip(cpus, counts, strict=True) for share in _divide_node(machine, group, count)]


def ranks_per_node(cores: list[int], ranks: int) -> list[int]:
    """The number of ranks of each node. Their total is `ranks`, at least one per node.

    Ranks are divided evenly; nodes with more cores get the remainder. If a node has fewer cores than ranks (because of
    a cpuset), ranks move to the node with most cores to spare.
    """
    order = sorted(range(len(cores)), key=lambda i: (-cores[i], i))
    counts = [ranks // len(cores)] * len(cores)
    for i in order[: ranks % len(cores)]:
        counts[i] += 1
    while True:
        full = max(range(len(cores)), key=lambda i: counts[i] - cores[i])
        spare = max(range(len(cores)), key=lambda i: cores[i] - counts[i])
        if counts[full] <= cores[full] or counts[spare] >= cores[spare] or counts[full] == 1:
            return counts
        counts[full] -= 1
        counts[spare] += 1


def _divide_node(machine: Machine, cpus: list[int], ranks: int) -> list[list[int]]:
    """Divides the CPUs of one node by whole cores. Fast and efficient cores are divided evenly each.

    Cores that share a cache stay together.
    """
    if not ranks:
        return []
    cores: dict[tuple[bool, int, int], list[int]] = {}
    for number in cpus:
        cpu = machine.by_number.get(number)
        key = (cpu.efficient, cpu.l3, cpu.core) if cpu else (False, -1, number)
        cores.setdefault(key, []).append(number)
    units = sorted(cores.items())
    if len(units) < ranks:  # divide hardware threads instead
        return _cuts([number for _, core in units for number in core], ranks)
    fast = _cuts([numbers for (slow, _, _), numbers in units if not slow], ranks)
    slow = [numbers for (slow, _, _), numbers in units if slow]
    counts = [0] * ranks
    for _ in slow:  # each to a rank with the fewest cores
        counts[min(range(ranks), key=lambda i: len(fast[i]) + counts[i])] += 1
    ends = list(itertools.accumulate(counts))
    return [
        list(itertools.chain(*cores, *slow[end - count : end]))
        for cores, count, end in zip(fast, counts, ends, strict=True)
    ]


def _cuts(items: list[Item], parts: int) -> list[list[Item]]:
    """Contiguous parts of nearly equal length."""
    return [items[len(items) * i // parts : len(items) * (i + 1) // parts] for i in range(parts)]


def threads_first(machine: Machine, share: tuple[int, ...]) -> list[int]:
    """A share's CPUs in the order of threads: first hardware threads of fast cores, then of efficient cores, then SMT
    siblings.
    """
    within: dict[int, int] = {}

    def key(number: int) -> tuple[int, bool, int]:
        """Sort key of a CPU."""
        cpu = machine.by_number.get(number)
        core = cpu.core if cpu else number
        # Count only threads of the share: a cpuset may have only the second thread of a core.
        order = within[core] = within.get(core, -1) + 1
        return order, cpu.efficient if cpu else False, number

    return [number for *_, number in sorted(map(key, sorted(share)))]


def _node(machine: Machine, number: int) -> int:
    cpu = machine.by_number.get(number)
    return cpu.node if cpu else machine.nodes[0].number


def _package(machine: Machine, number: int) -> int:
    cpu = machine.by_number.get(number)
    return cpu.package if cpu else 0


def _nodes(machine: Machine, share: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({_node(machine, number) for number in share}))


def _memory(machine: Machine, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """For each of `nodes` the nearest node with usable memory; empty if the machine has one node or none is usable."""
    allowed = machine.binding.memory_nodes
    usable = [n.number for n in machine.nodes if n.memory and (allowed is None or n.number in allowed)]
    if len(machine.nodes) < 2 or not usable:
        return ()
    return tuple(sorted({min(usable, key=lambda n: (machine.distance(node, n), n)) for node in nodes}))


def _note(machine: Machine, masks: list[tuple[int, ...]], everyone: list[tuple[int, ...]]) -> str:
    """A line, for rank 0 to print, about a placement that could be better."""
    if machine.simple:
        return machine.simple
    used = machine.cores({cpu for share in everyone for cpu in share})
    if len(set(masks)) > 1 and 2 * len(used) <= len(machine.cores()):
        return (
            f"the launcher bound the ranks to {len(used)} of {len(machine.cores())} cores: "
            "mpirun --bind-to none lets ckdist divide them all"
        )
    own = [node for node in machine.nodes if node.cpus]
    if len(own) > len(masks):
        ranks = "one rank" if len(masks) == 1 else f"{len(masks)} ranks"
        return f"{ranks} for {len(own)} NUMA nodes: memory is spread over several; -tp {len(own)} keeps it local"
    return ""


def bind_memory(placement: Placement) -> None:
    """Binds weights, caches and buffers that are allocated from now on to the placement's nodes."""
    native.check(native.lib.ckdist_place_memory(list(placement.memory), len(placement.memory), placement.sharers))
