"""Measures read bandwidth of memory: of threads of one process, and of all ranks of a job at once.

The latter is measured once for each machine and placement, and stored in the user's cache.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence

from ckdist import native
from ckdist.comm.host_name import machine_name
from ckdist.comm.user_cache import read_kept, write_kept
from ckdist.comm.world_protocol import World
from ckdist.errors import CkdistError
from ckdist.topology.binding import times_preempted
from ckdist.topology.machine import Machine, this_machine
from ckdist.topology.placement import Placement, threads_first

READ_BYTES = 256 << 20  # per thread; much larger than most caches
LEAST_READ, MOST_READ = 128 << 20, 2 << 30  # bytes of one measurement
REPEATS = 3
PASSES = 8  # passes of a stored measurement; the best counts, so a short time without other load is enough
METHOD = 2  # version of the method; results of other versions are ignored
TRIES = 3  # starts that measure again because other work used their cores; the best result is kept


def read_bandwidth(threads: int, cpus: Sequence[int] = (), repeats: int = 5, bytes_each: int = 0) -> float:
    """Bytes per second that `threads` threads of this process read together; the best of `repeats` passes.

    Args:
        bytes_each: Bytes per thread. 0: READ_BYTES.
    """
    pins = cpus if len(cpus) >= threads else None
    return native.call(native.lib.ckdist_read_bandwidth, threads, pins, bytes_each or READ_BYTES, repeats)


def read_size(machine: Machine, cpus: Sequence[int]) -> int:
    """Bytes to read so that `cpus` read memory and not their caches, limited by the available memory."""
    caches = len({machine.by_number[cpu].l3 for cpu in cpus}) * machine.l3_bytes
    return min(max(LEAST_READ, 4 * caches), MOST_READ, native.lib.ckdist_available_memory() // 4)


def node_cpus(machine: Machine) -> dict[int, list[int]]:
    """Node -> one CPU of each physical core, for nodes with CPUs that this process may use."""
    result = {}
    for node in machine.nodes:
        mine = tuple(cpu for cpu in node.cpus if cpu in machine.binding.cpus)
        if mine:
            result[node.number] = threads_first(machine, mine)[: len(machine.cores(mine))]
    return result


def read_node(machine: Machine, cpus: list[int], memory: int, repeats: int) -> float:
    """Bytes per second that `cpus` read together from the memory of a node.

    Raises CapacityError if the node has too little memory for the test.
    """
    size = read_size(machine, cpus)
    nodes = [memory] if len(machine.nodes) > 1 else []
    native.check(native.lib.ckdist_place_memory(nodes, len(nodes), 1))
    return read_bandwidth(len(cpus), cpus, repeats, size // len(cpus))


def rank_bandwidths(world: World, placement: Placement, threads: int) -> list[float | None]:
    """Bytes per second that each rank reads from its memory while all ranks read. A collective call.

    None for a rank whose threads are not pinned, or that has too little memory to measure.
    """
    where = world.gather([machine_name(world.hosts[world.rank]), list(placement.cpus), list(placement.memory)])
    key = json.dumps([METHOD, this_machine().model, world.rank, threads, where])
    best, tries = _kept(key)
    known = world.gather(None if tries else best)
    if None not in known or not all(cpus for _, cpus, _ in where):
        return known if None not in known else [None] * world.size
    measured = None
    with contextlib.suppress(CkdistError):  # a failed measurement must not stop the job
        cpus, before = placement.cpus[:threads], times_preempted()
        measured = read_bandwidth(threads, cpus, PASSES, read_size(this_machine(), cpus) // threads)
        measured = max(measured, best)
        _keep(key, measured, tries - 1 if times_preempted() > before else 0)
    return world.gather(measured)


def _name(key: str) -> str:
    return f"bandwidth/{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _kept(key: str) -> tuple[float, int]:
    """(stored bandwidth, number of starts that should measure again); (0, TRIES) without a valid stored result."""
    try:
        found = read_kept(_name(key))
        best, tries = found["bandwidth"], found["tries"]
        if found["key"] == key and 0 < best < float("inf") and 0 <= tries < TRIES:
            return best, tries
    except (TypeError, KeyError):
        pass
    return 0.0, TRIES


def _keep(key: str, bandwidth: float, tries: int) -> None:
    write_kept(_name(key), {"key": key, "bandwidth": bandwidth, "tries": tries})
