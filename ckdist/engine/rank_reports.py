"""Facts and counters of every rank, collected on rank 0 for clients that watch the machine.

Ranks are asked between two steps, and only while a client watches, so a step costs nothing more.
"""

from typing import Any

from ckdist.comm.host_name import machine_name
from ckdist.engine.loaded_model import Model
from ckdist.program.executable import Executable, StepStats
from ckdist.topology.bandwidth import rank_bandwidths
from ckdist.topology.tree import format_cpu_list


class RankReports:
    """Facts about every rank, and their counters as of the last `refresh`.

    All ranks construct it together, before any step of requests. The first time on a machine measures how fast ranks
    read.
    """

    def __init__(self, model: Model) -> None:
        world, plan = model.world, model.plan
        placement = plan.placement
        with model.loader.held():
            bandwidths = rank_bandwidths(world, placement, plan.threads)
        own = {
            "host": machine_name(world.hosts[world.rank]),
            "nodes": format_cpu_list(placement.nodes),
            "cpus": format_cpu_list(placement.share),
            "threads": plan.threads,
            "weights_bytes": model.weight_bytes,
            "cache_bytes": model.executable.kv_bytes,
            "packing_bytes": model.loader.filled.bytes,
        }
        facts: list[dict[str, Any]] = world.gather(own)
        self._facts = [
            {"rank": rank, **fact, "bandwidth": bandwidth}
            for rank, (fact, bandwidth) in enumerate(zip(facts, bandwidths, strict=True))
        ]
        self._executable: Executable = model.executable
        self._stats: list[StepStats] = []

    def refresh(self) -> None:
        """Collects every rank's counters. Only on rank 0, between two steps. Raises CommError if a rank is lost."""
        self._stats = self._executable.reports()

    def rows(self) -> list[dict[str, Any]]:
        """Per rank: its facts, and after a `refresh` its counters since the start (bytes and seconds)."""
        if not self._stats:
            return self._facts
        return [{**fact, **_counters(stats)} for fact, stats in zip(self._facts, self._stats, strict=True)]


def _counters(stats: StepStats) -> dict[str, float | None]:
    return {
        "steps_total": stats.runs,
        "step_seconds_total": stats.total,
        "wait_seconds_total": stats.barrier,  # for the rank's own threads
        "exchange_seconds_total": stats.exchange,  # for the other ranks and their data
        "decode_steps_total": stats.decode_runs,
        "decode_seconds_total": stats.decode,
        "decode_read_bytes_total": stats.decode_read,
        "packed_bytes": stats.packed if stats.packed >= 0 else None,
    }
