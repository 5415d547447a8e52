"""A rank's stage: which layers it has, their programs, and whom it meets.

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
from ckdist.comm.protocol import World
from ckdist.comm.transports.link import Link, measured_link
from ckdist.config.engine import EngineConfig
from ckdist.errors import ConfigError
from ckdist.layout import SINGLE, Layout, Range
from ckdist.mesh import Mesh
from ckdist.models.decoder import forward, hidden_forward, main_forward
from ckdist.models.spec import ModelSpec
from ckdist.planning.layout_choice import choose_layout
from ckdist.planning.layouts import NOMINAL_LINK, can_dispatch, layouts_for, places_experts, uneven
from ckdist.planning.plan import Plan
from ckdist.planning.stages import (
    ProductWork,
    StageRank,
    check_stages,
    divide_layers,
    exchange_line,
    product_work,
    prompt_machine,
    stage_costs,
    stage_lines,
)
from ckdist.program.executable import StageRanks
from ckdist.program.program import Program
from ckdist.program.tracer import Tracer, trace
from ckdist.topology.binding import own_cpus
from ckdist.weights.adapter import Adapter
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.loader import ShardLoader
from ckdist.weights.packed_type import WeightCost, weight_cost

log = logging.getLogger(__name__)

ARENA_BYTES = 64 << 20  # of the communicator's shared memory: the replay's buffers are its own


@dataclass(frozen=True)
class Traced:
    """This rank's part of a model as programs: decode's, and prefill's where that shards tokens; `layouts`: of prefill,
    of decode, mesh. `link`: between hosts. `dispatches`: rows may go to the hosts of their experts. `hidden_programs`:
    those that make hidden states in place of logits, by layout; none of an encoder, of which all do, and where there
    are several stages.
    """

    checkpoint: Checkpoint
    rank: StageRank
    layouts: tuple[Layout, Layout, Mesh]
    adapter: Adapter | None
    program: Program
    token_program: Program | None
    link: Link
    dispatches: bool
    hidden_programs: list[Program]

    @property
    def spec(self) -> ModelSpec:
        """The model with the layers of this rank's stage."""
        spec, (begin, end) = self.checkpoint.spec, self.rank.stage.layers
        return dataclasses.replace(spec, layers=spec.layers[begin:end])


def with_chosen_layout(config: EngineConfig, world: World, checkpoint: Checkpoint) -> EngineConfig:
    """The configuration with its stages, which `--layout auto` chooses; a collective call. Over several hosts that is
    the default, unless a flag says how the model is divided.
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
    """The layers of each stage, the same on every rank; a collective call. ConfigError where there cannot be so many
    stages.
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
    agree(world, "model", program.digest())  # each stage compares but its own part
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
    """The programs of this rank's stage; a collective call. `embeddings`: a decoder's hidden states are wanted too.

    CommError where ranks of a stage have different programs.
    """
    spec, stage = checkpoint.spec, rank.stage
    placed = config.experts != "tensor" and all(world.gather(places_experts(rank.world, spec)))
    link = measured_link(world, config.transport, config.comm_timeout) if placed else NOMINAL_LINK
    prefill, decode, mesh = layouts_for(config, rank.world, spec, link)
    # every stage has the same plans; what an encoder has read is cached by heads
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
    """Whether every stage can send rows to the hosts of their experts, and shares rows out among as many hosts: ranks
    of one place in their stages then have the same rows. A collective call.
    """
    hosts = len(set(rank.world.hosts)) if can_dispatch(rank.world, prefill) else 0
    alike = set(world.gather(hosts)) == {hosts} != {0}
    if world.rank == 0 and "experts" in prefill.sharded_by and not alike:
        why = uneven(rank.world) or "stages are on unequal numbers of hosts or of ranks on each"
        log.debug("experts: rows are summed over all hosts in every step: %s", why)
    return alike


def open_communicators(
    config: EngineConfig, world: World, traced: Traced, plan: Plan, weight: Callable[[str], WeightCost]
) -> tuple[Communicator, StageRanks | None]:
    """The communicator of the job, and where there are several stages whom this rank meets in them; a collective
    call. `weight`: of a matrix.
    """
    rank, hidden, decode = traced.rank, traced.spec.hidden_size, (traced.program, plan.mesh)
    rows = StageRanks.arena_bytes(rank.stage.count, rank.world.size, plan.cache.max_tokens, hidden)
    communicator = open_communicator(
        world, config.transport, timeout=config.comm_timeout, spins=plan.spins, arena_bytes=ARENA_BYTES + rows
    )
    if rank.stage.count == 1:
        return communicator, None
    machine = prompt_machine(traced.program, weight, plan.placement.cpus or own_cpus(), config.cache_type_k)
    own_work = product_work(*decode, weight, machine)
    works = {number: work for number, *work in world.gather([rank.stage.number, *own_work])}
    costs = stage_costs([ProductWork(*work) for work in works.values()])
    own = communicator.split(color=rank.stage.number)
    assert own is not None  # of a color that is not negative
    return communicator, StageRanks(own, costs, rank.previous, rank.next, hidden)


def tell_stages(world: World, traced: Traced, communicator: Communicator, weight_bytes: int) -> None:
    """Says what each stage has, or where there is one what more would change between hosts; a collective call."""
    stage, hosts, times = traced.rank.stage, len(set(world.hosts)), communicator.exchange_times
    rows = world.gather([stage.number, *stage.layers, weight_bytes])
    if world.rank != 0:
        return
    for line in stage_lines(rows) if stage.count > 1 else ():
        log.debug("%s", line)
    if stage.count == 1 and hosts > 1 and times is not None:
        log.debug("%s", exchange_line(traced.program, hosts, Link.of_exchanges(*times)))
