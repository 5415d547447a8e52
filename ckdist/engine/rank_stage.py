"""A rank's stage: its layers, their programs, and its communicators.

Every function here is called by all ranks of a world together.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from ckdist import native
from ckdist.comm.agreement import agree
from ckdist.comm.communicator import Communicator, open_communicator
from ckdist.comm.transports.link import Link, measured_link
from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.stage_ranks import StageRank, StageWork, stage_costs, stage_lines, stage_work
from ckdist.errors import ConfigError
from ckdist.layout import SINGLE, Layout, Range
from ckdist.layouts.layout_choice import choose_layout
from ckdist.layouts.phase_layouts import NOMINAL_LINK, can_dispatch, layouts_for, places_experts, uneven
from ckdist.layouts.rank_plan import Plan
from ckdist.layouts.stage_plan import check_stages, divide_layers
from ckdist.mesh import Mesh
from ckdist.models.decoder import forward, hidden_forward, main_forward
from ckdist.models.spec import ModelSpec
from ckdist.program.executable import StageRanks
from ckdist.program.program import Program
from ckdist.program.tracer import Tracer, trace
from ckdist.weights.adapter import Adapter
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.loader import ShardLoader
from ckdist.weights.packed_type import WeightCost, weight_cost

log = logging.getLogger(__name__)

ARENA_BYTES = 64 << 20  # of the communicator's shared memory; the replay has buffers of its own


@dataclass(frozen=True)
class Traced:
    """This rank's part of a model as programs."""

    checkpoint: Checkpoint
    rank: StageRank
    layouts: tuple[Layout, Layout, Mesh]  # of prefill, of decode, mesh
    adapter: Adapter | None
    program: Program  # of decode
    token_program: Program | None  # of prefill, if that shards tokens
    link: Link  # between hosts
    dispatches: bool  # rows may go to the hosts of their experts
    # By layout, with hidden states in place of logits. Empty for an encoder, whose programs all do so, and with stages.
    hidden_programs: list[Program]

    @property
    def spec(self) -> ModelSpec:
        """The model with the layers of this rank's stage."""
        spec, (begin, end) = self.checkpoint.spec, self.rank.stage.layers
        return dataclasses.replace(spec, layers=spec.layers[begin:end])


def with_chosen_layout(config: EngineConfig, world: World, checkpoint: Checkpoint) -> EngineConfig:
    """The configuration with its number of stages. A collective call.

    `--layout auto` chooses the number. It is the default over several hosts, unless a flag says how to divide the
    model.
    """
    divided = config.pipeline_parallel_size or config.tensor_parallel_size or config.prefill != "auto"
    chooses = config.layout == "auto" or not (len(set(world.hosts)) == 1 or divided or config.experts != "auto")
    if not chooses or not checkpoint.spec.generates or checkpoint.spec.reads_whole:
        return dataclasses.replace(config, pipeline_parallel_size=config.pipeline_parallel_size or 1)
    choice = choose_layout(world, config, checkpoint)
    if world.rank == 0:
        log.info("layout: %s", choice.reason)
    return dataclasses.replace(config, pipeline_parallel_size=choice.stages)


def layers_of_stages(
    config: EngineConfig, world: World, loader: ShardLoader, tracer: Callable[[Layout, Mesh], Tracer]
) -> list[Range]:
    """The layers of each stage, the same on every rank. A collective call.

    Raises ConfigError if the model or the job cannot have that many stages.
    """
    spec, count = loader.checkpoint.spec, config.pipeline_parallel_size
    check_stages(count, world.size, len(spec.layers))
    if count == 1:
        return [(0, len(spec.layers))]
    if spec.reads_whole:
        raise ConfigError(
            f"{spec.family} has an encoder, which has no stages: leave --pipeline-parallel-size {count} out"
        )
    program = trace(forward, spec, SINGLE, Mesh(), tracer)
    agree(world, "model", program.digest())  # each stage compares only its own part
    layers = divide_layers(program, count, native.isa(), functools.partial(weight_cost, loader))
    return [(begin, end) for begin, end in world.broadcast(layers)]


def trace_stage(
    config: EngineConfig,
    world: World,
    rank: StageRank,
    checkpoint: Checkpoint,
    adapter: Adapter | None,
    tracer: Callable[[Layout, Mesh], Tracer],
    embeddings: bool,
) -> Traced:
    """The programs of this rank's stage. A collective call.

    Args:
        embeddings: A decoder's hidden states are wanted too.

    Raises:
        CommError: Ranks of a stage have different programs.
    """
    spec, stage = checkpoint.spec, rank.stage
    placed = config.experts != "tensor" and all(world.gather(places_experts(rank.world, spec)))
    link = measured_link(world, config.transport, config.comm_timeout) if placed else NOMINAL_LINK
    prefill, decode, mesh = layouts_for(config, rank.world, spec, link)
    # Every stage needs the same plans. The output of an encoder is cached by heads.
    if spec.encoder is not None or not all(world.gather(prefill is not decode)):
        prefill = decode
    main, layouts = main_forward(spec), [decode] if prefill is decode else [decode, prefill]
    program = trace(main, spec, decode, mesh, tracer)
    if adapter:
        adapter.check(program)
    program = stage.program(program, mesh)
    by_token = stage.program(trace(main, spec, prefill, mesh, tracer), mesh) if prefill is not decode else None
    agree(rank.world, "program", program.digest())
    wanted = spec.generates and (embeddings or spec.encoder is not None)
    hidden = layouts if stage.count == 1 and wanted else []
    hidden_programs = [trace(hidden_forward(spec), spec, layout, mesh, tracer) for layout in hidden]
    layouts, dispatches = (prefill, decode, mesh), dispatch_alike(world, rank, prefill)
    return Traced(checkpoint, rank, layouts, adapter, program, by_token, link, dispatches, hidden_programs)


def dispatch_alike(world: World, rank: StageRank, prefill: Layout) -> bool:
    """Whether all stages can send rows to the hosts of their experts and shard rows over equally many hosts.

    Ranks with the same place in their stages then have the same rows. A collective call.
    """
    hosts = len(set(rank.world.hosts)) if can_dispatch(rank.world, prefill) else 0
    is_uniform = set(world.gather(hosts)) == {hosts} != {0}
    if world.rank == 0 and "experts" in prefill.sharded_by and not is_uniform:
        why = uneven(rank.world) or "stages are on unequal numbers of hosts or of ranks on each"
        log.debug("experts: rows are summed over all hosts in every step: %s", why)
    return is_uniform


def open_communicators(
    config: EngineConfig,
    world: World,
    traced: Traced,
    plan: Plan,
    weight: Callable[[str], WeightCost],
    communicator: Communicator | None = None,
) -> tuple[Communicator, StageRanks | None]:
    """Returns the job's communicator and, with several stages, this rank's StageRanks. A collective call.

    Args:
        weight: Returns the cost of a matrix.
        communicator: All ranks, if the rank runs other models. None: it is opened.
    """
    rank, hidden = traced.rank, traced.spec.hidden_size
    rows = StageRanks.arena_bytes(rank.stage.count, rank.world.size, plan.cache.max_tokens, hidden)
    communicator = communicator or open_communicator(
        world, config.transport, timeout=config.comm_timeout, spins=plan.spins, arena_bytes=ARENA_BYTES + rows
    )
    if rank.stage.count == 1:
        return communicator, None
    own_work = stage_work(traced.program, plan.mesh, weight, native.isa())
    works = {number: work for number, *work in world.gather([rank.stage.number, *own_work])}
    costs = stage_costs([StageWork(*work) for work in works.values()])
    own = communicator.split(color=rank.stage.number)
    assert own is not None  # the color is not negative
    return communicator, StageRanks(own, costs, rank.previous, rank.next, hidden)


def tell_stages(world: World, traced: Traced, weight_bytes: int) -> None:
    """Logs the layers of each stage. A collective call."""
    stage = traced.rank.stage
    rows = world.gather([stage.number, *stage.layers, weight_bytes])
    for line in stage_lines(rows) if world.rank == 0 and stage.count > 1 else ():
        log.debug("%s", line)
