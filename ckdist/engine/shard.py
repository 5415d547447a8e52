"""A rank's shard of a model: its steps, and the matrices and vectors that they read, planned but not loaded."""

from collections.abc import Mapping
from dataclasses import dataclass

from ckdist import native
from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.rank_stage import Traced
from ckdist.errors import ConfigError
from ckdist.layout import Dim
from ckdist.layouts.memory_sizes import WeightBytes
from ckdist.layouts.rank_plan import Plan, make_plan, step_tokens
from ckdist.mesh import Mesh
from ckdist.models.blocks.moe import is_expert
from ckdist.program.execution_plan import ExecutionPlan
from ckdist.program.lower import lower, stored_dims
from ckdist.program.lowered import Lowered
from ckdist.program.program import Program
from ckdist.topology import bind_memory
from ckdist.weights.adapter import Adapter, PackedMatrix, is_low_rank
from ckdist.weights.dtypes import BY_NUMBER
from ckdist.weights.handles import MatrixHandle, VectorHandle
from ckdist.weights.host_shards import HostShards
from ckdist.weights.loader import ShardLoader
from ckdist.weights.packed_type import packed_type


@dataclass(frozen=True)
class Shard:
    """A rank's shard, planned, with an open arena that is not filled."""

    traced: Traced
    loader: ShardLoader
    lowered: Lowered  # of decode
    matrices: list[MatrixHandle | PackedMatrix]  # of decode
    weight_bytes: int
    plan: Plan
    plans: list[ExecutionPlan]
    hidden_plans: list[ExecutionPlan]
    shards: HostShards | None


def plan_and_open(traced: Traced, loader: ShardLoader, config: EngineConfig, world: World) -> Shard:
    """Lowers the programs, plans weights and cache, and opens this rank's arena where its threads run.

    A collective call. Raises CapacityError if weights or cache do not fit.
    """
    checkpoint, adapter = traced.checkpoint, traced.adapter
    program, token_program, mesh = traced.program, traced.token_program, traced.layouts[2]
    max_tokens = step_tokens(config, checkpoint.spec)
    lowered = lower_for(loader, program, mesh, max_tokens)
    matrices, vectors = plan_shard(loader, lowered, adapter)
    encoders = [] if checkpoint.spec.encoder is None else traced.hidden_programs
    lowered_encoders = [lower_for(loader, encoder, mesh, max_tokens) for encoder in encoders]
    read = [(steps, *plan_shard(loader, steps)) for steps in lowered_encoders]  # encoders have weights of their own
    check_quantize(loader, lowered, world)
    weight_bytes = loader.planned_bytes + (adapter.bytes if adapter else 0)
    expert_handles = dict.fromkeys(h for key, h in zip(lowered.matrices, matrices, strict=True) if is_expert(key.name))
    experts = sum(BY_NUMBER[h.type].row_bytes(h.rows * h.cols) for h in expert_handles)
    caches = {n: cache for steps in (lowered, *lowered_encoders) for n, cache in steps.caches.items()}
    sizes = WeightBytes(weight_bytes, experts)
    plan = make_plan(config, traced.spec, world, sizes, traced.layouts, caches.values())
    plan.placement.enter()
    bind_memory(plan.placement)
    loader.open(shared=token_program is not None)
    shards = None
    if token_program is not None:
        handles = {k: m for k, m in zip(lowered.matrices, matrices, strict=True) if isinstance(m, MatrixHandle)}
        shards = HostShards(traced.rank.world, loader, handles, dict(zip(lowered.vectors, vectors, strict=True)))
    own = ExecutionPlan(lowered, [m.address for m in matrices], [v.address for v in vectors])
    encoding = [ExecutionPlan(steps, [m.address for m in ms], [v.address for v in vs]) for steps, ms, vs in read]

    def plan_of(one: Program) -> ExecutionPlan:
        """The plan of a program that reads the weights of `lowered`."""
        if one is program:
            return own
        if shards is None or one.inputs[0].dims[0].axis is None:
            return over_the_weights_of(own, lower_for(loader, one, mesh, max_tokens))
        steps = lower_for(loader, one, mesh, max_tokens, stored_dims(one, program))
        addresses = [
            adapter.matrix(key).address if adapter and is_low_rank(key.name) else shards.matrix(key)
            for key in steps.matrices
        ]
        return ExecutionPlan(steps, addresses, [shards.vector(*key) for key in steps.vectors])

    plans = [plan_of(one) for one in (program, token_program) if one is not None]
    if traced.dispatches:
        stored = None if token_program is None else stored_dims(token_program, program)
        by_host = lower_for(loader, token_program or program, mesh, max_tokens, stored, host_rows=True)
        plans.append(over_the_weights_of(plans[-1], by_host))
    hidden_plans = encoding or [plan_of(one) for one in traced.hidden_programs]
    if not checkpoint.spec.generates:
        plans, hidden_plans = [], plans
    return Shard(traced, loader, lowered, matrices, weight_bytes, plan, plans, hidden_plans, shards)


def over_the_weights_of(plan: ExecutionPlan, lowered: Lowered) -> ExecutionPlan:
    """A plan of another lowering of a program, over the same weights."""
    matrices = dict(zip(plan.lowered.matrices, plan.matrices, strict=True))
    vectors = dict(zip(plan.lowered.vectors, plan.vectors, strict=True))
    return ExecutionPlan(lowered, [matrices[k] for k in lowered.matrices], [vectors[k] for k in lowered.vectors])


def lower_for(
    loader: ShardLoader,
    program: Program,
    mesh: Mesh,
    max_tokens: int,
    stored: Mapping[Dim, Dim] | None = None,
    host_rows: bool = False,
) -> Lowered:
    """Lowers a program for weights in the types that the loader packs."""
    return lower(
        program,
        mesh,
        formats=lambda name: native.lib.ckdist_activation_format(native.ffi.NULL, packed_type(loader, name)),
        block_columns=lambda name: native.lib.ckdist_type_undivided_columns(packed_type(loader, name)),
        max_tokens=max_tokens,
        stored=stored,
        host_rows=host_rows,
    )


def check_quantize(loader: ShardLoader, lowered: Lowered, world: World) -> None:
    """Raises ConfigError if --quantize would change no weight on any rank. A collective call.

    The weights are then quantised already, or no row consists of whole blocks.
    """
    names = [key.name for key in lowered.matrices if not is_low_rank(key.name)]
    sources = {name: loader.checkpoint.tensors[name] for name in names}
    changes = any(loader.type_of(name) != source.type for name, source in sources.items())
    if loader.quantize is None or any(world.gather(changes)):
        return
    types = ", ".join(sorted({BY_NUMBER[source.type].name for source in sources.values()}))
    raise ConfigError(
        f"--quantize {loader.quantize} changes nothing in {loader.checkpoint.path}, whose matrices are {types}: "
        "it packs rows of F32, F16 or BF16 that its blocks divide; leave it out"
    )


def plan_shard(
    loader: ShardLoader, lowered: Lowered, adapter: Adapter | None = None
) -> tuple[list[MatrixHandle | PackedMatrix], list[VectorHandle]]:
    """Plans this rank's part of every weight of a lowered program, in the loader or the adapter.

    Columns are widened to whole blocks.
    """
    matrices: list[MatrixHandle | PackedMatrix] = []
    for key in lowered.matrices:
        name, rows, (begin, end), stack = key
        if is_low_rank(name):
            assert adapter is not None  # the program was traced with one
            matrices.append(adapter.matrix(key))
            continue
        block = native.lib.ckdist_type_undivided_columns(loader.type_of(name))
        last = loader.checkpoint.tensors[name].shape[-1]
        columns = (begin // block * block, min(-(-end // block) * block, last)) if end > begin else (0, 0)
        matrices.append(loader.add_matrix(name, [rows], columns, stack))
    return matrices, [loader.add_vector(name, *share) for name, share in lowered.vectors]
