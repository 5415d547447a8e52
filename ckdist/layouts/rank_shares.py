"""The shares of a model that ranks hold, if hosts differ in speed or memory.

A decode step reads all weights and ends when the slowest rank has read its own. So a rank's share is in proportion to
the rate at which it reads memory, as far as its memory allows. Ranks on equal hardware have equal shares, whatever is
measured, so that their results have the same bits at every start.
"""

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from fractions import Fraction

from ckdist.comm.host_name import machine_name
from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.errors import CkdistError, ConfigError
from ckdist.layouts.memory_sizes import free_memory
from ckdist.topology import default_threads
from ckdist.topology.bandwidth import read_bandwidth, read_size
from ckdist.topology.machine import this_machine
from ckdist.topology.placement import quota_of
from ckdist.weights import dtypes
from ckdist.weights.checkpoint import Checkpoint

log = logging.getLogger(__name__)

SECONDS = 0.6  # of a measurement: several periods of a control group's quota
ALIKE = 1.25  # rates whose ratio is smaller count as equal
FULLEST = 0.8  # most of a rank's free memory that weights take
STEPS = 8  # a measured share is a multiple of 1 / STEPS of the largest


def rank_shares(config: EngineConfig, world: World, checkpoint: Checkpoint) -> tuple[int, ...]:
    """The relative share of each rank by --tensor-split; () if all are equal. A collective call.

    Raises ConfigError if the numbers do not fit the ranks.
    """
    if config.tensor_split not in ("auto", "even"):
        return given_shares(config.tensor_split, world)
    threads = default_threads(world, config.threads)
    if len({tuple(facts) for facts in world.gather(hardware(world, threads))}) == 1:
        return ()
    if config.tensor_split == "auto" and len(set(world.hosts)) > 1:
        return measured_shares(config, world, threads, stored_bytes(checkpoint))
    if world.rank == 0:
        log.info("hosts differ, and ranks hold equal parts of the model: --tensor-split auto measures their memory")
    return ()


def stored_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all tensors in the files."""
    kinds = [(dtypes.BY_NUMBER[tensor.type], math.prod(tensor.shape)) for tensor in checkpoint.tensors.values()]
    return sum(kind.row_bytes(elements) for kind, elements in kinds)


def given_shares(text: str, world: World) -> tuple[int, ...]:
    """The shares that a user gives, by rank or by host; a host's share is divided evenly over its ranks."""
    numbers, hosts = [Fraction(part.strip()) for part in text.split(",")], list(dict.fromkeys(world.hosts))
    if len(numbers) == world.size:
        return whole_numbers(numbers)
    if len(numbers) != len(hosts):
        raise ConfigError(
            f"--tensor-split {text} has {len(numbers)} numbers: give one for each of the {world.size} ranks"
            + (f", or for each of the {len(hosts)} hosts" if len(hosts) > 1 else "")
        )
    each = {host: number / world.hosts.count(host) for host, number in zip(hosts, numbers, strict=True)}
    return whole_numbers([each[host] for host in world.hosts])


def whole_numbers(parts: Sequence[Fraction]) -> tuple[int, ...]:
    """The smallest whole numbers with the ratios of `parts`; () if all are equal."""
    scale = Fraction(math.lcm(*(part.denominator for part in parts)), math.gcd(*(part.numerator for part in parts)))
    found = [int(part * scale) for part in parts]
    common = math.gcd(*found)
    return () if len(set(found)) == 1 else tuple(part // common for part in found)


def measured_shares(config: EngineConfig, world: World, threads: int, weight_bytes: int) -> tuple[int, ...]:
    """The shares by the rates at which all ranks read memory at once, and by their free memory. A collective call."""
    rates = world.gather(read_rate(threads))
    rooms = world.gather(free_memory(world.local_size, config.own_memory))
    shares = shares_of(rates, [FULLEST * room / weight_bytes for room in rooms])
    if world.rank == 0 and shares:
        shown = ", ".join(
            f"rank {rank} on {machine_name(host)} {found / 1e9:.1f} GB/s"
            for rank, (host, found) in enumerate(zip(world.hosts, rates, strict=True))
        )
        log.warning(
            "hosts differ, so ranks hold %s parts of the model: %s; --tensor-split %s keeps this",
            ":".join(map(str, shares)), shown, ",".join(map(str, shares)),
        )  # fmt: skip
    return tuple(shares)


def hardware(world: World, threads: int) -> list[str | int]:
    """The CPU, threads and CPUs of time of this rank, and its host's memory in steps of an eighth."""
    machine = this_machine()
    return [machine.model, machine.amx, threads, f"{quota_of(world)}", round(8 * math.log2(machine.memory.total))]


def read_rate(threads: int) -> float:
    """Bytes per second that this rank reads, over whole periods of a quota; 0.0 with too little memory to measure."""
    machine = this_machine()
    each = read_size(machine, list(machine.binding.cpus)) // threads
    begun, seconds, reads = time.monotonic(), 0.0, 0
    with contextlib.suppress(CkdistError):  # a failed measurement must not stop the job
        while time.monotonic() - begun < SECONDS:
            seconds += threads * each / read_bandwidth(threads, (), 1, each)
            reads += 1
    return reads * threads * each / seconds if reads else 0.0


def shares_of(rates: Sequence[float], most: Sequence[float]) -> list[int]:
    """Shares in proportion to `rates`, in small whole numbers; [] if all are equal.

    `most`: the largest fraction of the model that each rank can hold. It is kept where the others have room for more.
    """
    if min(rates) <= 0 or max(rates) / min(rates) < ALIKE:
        rates = [1.0] * len(rates)
    parts = [rate / sum(rates) for rate in rates]
    for _ in rates:
        full = [part >= limit for part, limit in zip(parts, most, strict=True)]
        left = 1 - sum(limit for limit, is_full in zip(most, full, strict=True) if is_full)
        free = sum(part for part, is_full in zip(parts, full, strict=True) if not is_full)
        if left <= 0 or not free:
            break  # the model fits nowhere: the plan of memory says so
        parts = [
            limit if is_full else part * left / free for part, limit, is_full in zip(parts, most, full, strict=True)
        ]
    shares = [max(1, round(STEPS * part / max(parts))) for part in parts]
    return [] if len(set(shares)) == 1 else shares
