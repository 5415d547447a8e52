"""Binds a rank's steps to its weights, cache, threads and communicators.

Every function here is called by all ranks of a world together.
"""

import functools

from ckdist import native
from ckdist.comm.communicator import Communicator, open_communicator
from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.stage_ranks import StageRank
from ckdist.layouts.rank_plan import Plan
from ckdist.program.executable import Executable, StageRanks
from ckdist.program.execution_plan import ExecutionPlan
from ckdist.program.native_worker import NativeWorker
from ckdist.program.program import Program
from ckdist.weights.loader import ShardLoader
from ckdist.weights.packed_type import weight_cost
from ckdist.worker.colocation import Colocation

ARENA_BYTES = 64 << 20  # of the communicator's shared memory; the replay has buffers of its own


def bind(
    config: EngineConfig,
    world: World,
    rank: StageRank,
    program: Program,
    plan: Plan,
    loader: ShardLoader,
    plans: list[ExecutionPlan],
    hidden_plans: list[ExecutionPlan],
    colocation: Colocation | None,
) -> Executable:
    """Makes the executable of a rank, and the rank's worker if it has none yet. A collective call.

    `program`: decode.
    """
    spec, job = loader.checkpoint.spec, colocation and colocation.communicator
    communicator, stages = open_communicators(config, world, rank, program, plan, loader, job)
    if colocation is None:
        threads = max(plan.threads, plan.threads_batch)
        colocation = Colocation(NativeWorker(communicator, threads, plan.placement.cpus, plan.spins), communicator, 0)
    executable = Executable(
        plans if spec.generates else [],
        spec.at_context(plan.cache.context_length),
        communicator,
        plan.cache,
        plan.threads,
        plan.threads_batch,
        colocation.worker,
        loader.handle,
        stages,
        hidden_plans if spec.generates else plans,
        colocation.model,
    )
    if job is None:
        executable.join()
    return executable


def open_communicators(
    config: EngineConfig,
    world: World,
    rank: StageRank,
    program: Program,
    plan: Plan,
    loader: ShardLoader,
    communicator: Communicator | None,
) -> tuple[Communicator, StageRanks | None]:
    """Returns the job's communicator and, with several stages, this rank's StageRanks. A collective call.

    Args:
        program: Decode.
        communicator: All ranks, if the rank runs other models. None: it is opened.
    """
    sent = [sum(v.dims[-1].elements for v in instr.inputs) for instr in program.instrs if instr.op == "send"]
    hidden = max(world.gather(max(sent, default=0)))
    rows = StageRanks.arena_bytes(rank.stage.count, rank.world.size, plan.cache.max_tokens, hidden)
    communicator = communicator or open_communicator(
        world, config.transport, timeout=config.comm_timeout, spins=plan.spins, arena_bytes=ARENA_BYTES + rows
    )
    if rank.stage.count == 1:
        return communicator, None
    from ckdist.engine.stage_work import StageWork, stage_costs, stage_work

    own_work = stage_work(program, plan.mesh, functools.partial(weight_cost, loader), native.isa())
    works = {number: work for number, *work in world.gather([rank.stage.number, *own_work])}
    costs = stage_costs([StageWork(*work) for work in works.values()])
    own = communicator.split(color=rank.stage.number)
    assert own is not None  # the color is not negative
    return communicator, StageRanks(own, costs, rank.previous, rank.next, hidden)
