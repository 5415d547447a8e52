"""The programs of a rank's stage.

Every function here is called by all ranks of a world together.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckdist.comm.agreement import agree
from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.stage_ranks import StageRank
from ckdist.layout import Layout
from ckdist.layouts.phase_layouts import can_dispatch, layouts_for, places_experts, uneven
from ckdist.mesh import Mesh
from ckdist.models.decoder import hidden_forward, main_forward
from ckdist.models.spec import ModelSpec
from ckdist.program.program import Program
from ckdist.program.tracer import Tracer, trace

if TYPE_CHECKING:
    from ckdist.comm.transports.link import Link
    from ckdist.weights.adapter import Adapter
    from ckdist.weights.adapter_slots import AdapterSlots

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StagePrograms:
    """The programs of a stage."""

    layouts: tuple[Layout, Layout, Mesh]  # of prefill, of decode, mesh
    decode: Program
    prefill: Program | None  # if it shards tokens
    # The same for sequences that may have adapters. Empty without slots.
    adapted: tuple[Program, ...]
    # By layout, with hidden states in place of logits. Empty for an encoder, whose programs all do so, and with stages.
    hidden: list[Program]
    link: "Link | None"  # between hosts, if they share the experts
    dispatch_hosts: int  # hosts that rows of experts may go to; 0: rows stay here


def trace_programs(
    config: EngineConfig,
    world: World,
    rank: StageRank,
    spec: ModelSpec,
    adapter: "Adapter | None",
    slots: "AdapterSlots | None",
    tracer: Callable[[Layout, Mesh], Tracer],
    embeddings: bool,
) -> StagePrograms:
    """The programs of this rank's stage. A collective call.

    Args:
        embeddings: A decoder's hidden states are wanted too.

    Raises:
        CommError: Ranks of a stage have different programs.
    """
    stage = rank.stage
    placed = config.experts != "tensor" and all(world.gather(places_experts(rank.world, spec)))
    link = None
    if placed:
        from ckdist.comm.transports.link import measured_link

        link = measured_link(world, config.transport, config.comm_timeout)
    prefill, decode, mesh = layouts_for(config, rank.world, spec, link)
    mesh = replace(mesh, shares=rank.shares)
    # Every stage needs the same plans. The output of an encoder is cached by heads.
    if spec.encoder is not None or not all(world.gather(prefill is not decode)):
        prefill = decode
    main = main_forward(spec)
    if config.spec == "mtp":
        from ckdist.models.predictor import logits_and_rows as main
    layouts = [decode] if prefill is decode else [decode, prefill]
    program = trace(main, spec, decode, mesh, tracer)
    if adapter:
        adapter.check(program)
    program = stage.program(program, mesh)
    by_token = stage.program(trace(main, spec, prefill, mesh, tracer), mesh) if prefill is not decode else None
    adapted = ()
    if slots:
        wide = functools.partial(Tracer, low_rank=slots.low_rank)
        whole = [trace(main, spec, layout, mesh, wide) for layout in layouts]
        slots.check(whole[0])
        adapted = tuple(stage.program(one, mesh) for one in whole)
    agree(rank.world, "program", program.digest())
    wanted = spec.generates and (embeddings or spec.encoder is not None)
    hidden = layouts if stage.count == 1 and wanted else []
    hidden_programs = [trace(hidden_forward(spec), spec, layout, mesh, tracer) for layout in hidden]
    return StagePrograms(
        (prefill, decode, mesh), program, by_token, adapted, hidden_programs, link,
        # a part of a layer reads all streams, or blocks, of a token
        0 if spec.streams or spec.block_residuals else dispatch_hosts(world, rank, prefill),
    )  # fmt: skip


def dispatch_hosts(world: World, rank: StageRank, prefill: Layout) -> int:
    """The hosts of each stage if all stages can send rows to the hosts of their experts, over equally many; else 0.

    Ranks with the same place in their stages then have the same rows. A collective call.
    """
    hosts = len(set(rank.world.hosts)) if can_dispatch(rank.world, prefill) else 0
    is_uniform = set(world.gather(hosts)) == {hosts} != {0}
    if world.rank == 0 and "experts" in prefill.sharded_by and not is_uniform:
        why = uneven(rank.world) or "stages are on unequal numbers of hosts or of ranks on each"
        log.debug("experts: rows are summed over all hosts in every step: %s", why)
    return hosts if is_uniform else 0
