"""Makes the plan of a rank from a model, a world and a machine: layouts, size of the cache, threads.

The layouts come from `layouts`.
"""

import sys
from collections.abc import Collection
from dataclasses import dataclass

from ckdist import native, topology
from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.errors import CapacityError
from ckdist.layout import Layout
from ckdist.layouts.memory_sizes import WeightBytes, cache_name, free_memory, gigabytes, too_large
from ckdist.mesh import WHOLE, Mesh
from ckdist.models.spec import LEAST_UBATCH, ModelSpec
from ckdist.program.cache import LayerCache, block_bytes, slot_bytes
from ckdist.program.executable import CacheConfig
from ckdist.program.rotations import rope_bytes_per_position
from ckdist.program.step_batch import BLOCK_TOKENS

DEFAULT_CONTEXT = 8192  # default tokens of one sequence, if the model allows more
ENCODER_CONTEXT = 2048  # the same for an encoder, which needs buffers for a whole sequence
KV_SHARE = 0.5  # fraction of the memory without weights that the cache gets by default,
KV_TOKENS = 1 << 20  # up to this number of tokens, or one sequence
STATE_SHARE = 0.25  # fraction of that memory for states of sequences,
STATES_EACH = 4  # up to this number of states per running sequence

# polls of a flag before a thread sleeps: about 100 µs, longer than a barrier of ranks with their own cores
SPINS = 20000
SPINS_QUOTA = 2000  # about 10 µs: waiting counts towards the quota of a control group
SPINS_CROWDED = 20  # threads outnumber CPUs: a waiting thread must free its CPU


@dataclass(frozen=True)
class Plan:
    """The plan of one rank. All fields are equal on all ranks, except `mesh.rank`, `placement` and `memory`."""

    mesh: Mesh
    prefill: Layout
    decode: Layout
    cache: CacheConfig
    threads: int
    threads_batch: int
    spins: int
    placement: topology.Placement
    memory: int  # free bytes of this rank before the start

    @property
    def crowded(self) -> bool:
        """True if a rank of the job has more threads than CPUs."""
        return self.spins == SPINS_CROWDED

    def __str__(self) -> str:
        ranks = self.mesh.size(WHOLE)
        names = " and ".join(dict.fromkeys([self.decode.name, self.prefill.name]))
        layout = f"layouts {names} over {ranks} ranks" if ranks > 1 else "one rank"
        types = cache_name(self.cache.types)
        kv = f"{self.cache.num_blocks * BLOCK_TOKENS} tokens of {types} cache in blocks of {BLOCK_TOKENS}"
        kv += f", {self.cache.state_slots} states" if self.cache.state_slots else ""
        threads = f"{self.threads} threads ({self.threads_batch} with prompts)"
        return f"{layout}; {threads}; {kv}; context {self.cache.context_length}"


def wanted_context(config: EngineConfig, spec: ModelSpec) -> int:
    """The wanted positions of one sequence. Raises CapacityError if the model has fewer."""
    context = config.ctx_size or min(spec.max_position, ENCODER_CONTEXT if spec.reads_whole else DEFAULT_CONTEXT)
    if context > spec.max_position:
        raise CapacityError(
            f"--ctx-size {context} is more than the {spec.max_position} positions of the model: "
            f"--ctx-size {spec.max_position} is its longest"
        )
    return context


def step_tokens(config: EngineConfig, spec: ModelSpec) -> int:
    """The most tokens of a step. An encoder computes each sequence in one step."""
    most = min(config.ubatch_size or spec.usual_ubatch, config.batch_size)
    return max(most, config.ctx_size or min(spec.max_position, ENCODER_CONTEXT)) if spec.reads_whole else most


def make_plan(
    config: EngineConfig,
    spec: ModelSpec,
    world: World,
    weights: WeightBytes,
    layouts: tuple[Layout, Layout, Mesh],
    caches: Collection[LayerCache],
    step_bytes: int = 0,
) -> Plan:
    """Makes the plan of this rank, with `layouts` from `layouts_for`. A collective call: all get the same cache.

    `caches`: those of this rank's layers. `step_bytes`: those of a step's rows, if they are more than usual.

    Raises CapacityError, with a remedy, if weights or cache do not fit the free memory.
    """
    prefill, layout, mesh = layouts
    threads = topology.default_threads(world, config.threads)
    threads_batch = config.threads_batch or threads
    placement = topology.place(world, max(threads, threads_batch))
    types = config.cache_type_k, config.cache_type_v
    per_block, per_slot = native.lib.ckdist_block_stride(block_bytes(caches, types)), slot_bytes(caches)
    free = free_memory(world.local_size, config.own_memory, weights.kept)
    slots = _state_slots(config, world, per_slot, free - weights.total)
    room = free - weights.total - slots * per_slot - step_bytes
    if room < per_block:
        raise too_large(world.rank, (world.size, world.local_size), weights, per_block, free)
    context, rope = wanted_context(config, spec), rope_bytes_per_position(spec)
    limit = config.kv_memory or sys.maxsize
    budget = max(0, min(room - context * rope, limit))
    wanted = context if config.ctx_size or config.kv_memory else BLOCK_TOKENS
    # the longest sequence in blocks; without kv-heads and rotations, memory does not limit it
    each = per_block + BLOCK_TOKENS * rope
    most_blocks = sys.maxsize // BLOCK_TOKENS
    longest = min(room // each if each else most_blocks, limit // per_block if per_block else most_blocks)
    needed = -(-context // BLOCK_TOKENS) * per_block
    needed, there = (needed, limit) if needed > limit else (needed + context * rope, room)
    most = budget // per_block * BLOCK_TOKENS if per_block else sys.maxsize
    spins = SPINS_CROWDED if placement.crowded else SPINS if placement.quota is None else SPINS_QUOTA
    gathered = world.gather([most, needed, there, longest * BLOCK_TOKENS, spins])
    most, needed, there, *_ = min(gathered)  # of the rank with the least memory
    longest, spins = min(row[3] for row in gathered), min(row[4] for row in gathered)
    if most < wanted:
        least = f"give --kv-memory at least {per_block}, which holds {BLOCK_TOKENS} tokens"
        remedy = f"--ctx-size {longest} would fit" if longest else least
        raise CapacityError(
            f"one sequence of --ctx-size {context} needs {gigabytes(needed)} for its {cache_name(types)} cache "
            f"on each rank, and {gigabytes(there)} are free for it: {remedy}"
        )
    # Memory is touched only when blocks are used, and more blocks keep more prompts.
    share = 1.0 if config.memory else KV_SHARE
    limited = config.kv_memory and most < sys.maxsize  # not without attention
    total = most if limited else min(max(context, min(int(most * share), KV_TOKENS)), most)
    most_tokens, sequences = step_tokens(config, spec), config.parallel
    if not spec.generates:  # only the sequences of one step need a cache; they keep nothing for later steps
        sequences = max(sequences, most_tokens // BLOCK_TOKENS)
        total = min(total, most_tokens + sequences * BLOCK_TOKENS)
    context, blocks = min(context, total), -(-total // BLOCK_TOKENS)
    outputs = most_tokens if spec.reads_whole else min(most_tokens, max(LEAST_UBATCH, sequences))
    cache = CacheConfig(most_tokens, sequences, context, blocks, *types, slots, spec.predicts * most_tokens, outputs)
    return Plan(mesh, prefill, layout, cache, threads, threads_batch, spins, placement, max(0, free))


def _state_slots(config: EngineConfig, world: World, each: int, room: int) -> int:
    """The number of slots for states of sequences, equal on all ranks; 0: no layer has states. A collective call.

    Each running sequence needs one, and so does a snapshot. Raises CapacityError if these do not fit.

    Args:
        config: The settings.
        world: The ranks.
        each: Bytes of one state on this rank.
        room: Free bytes without the weights.
    """
    least = config.parallel + 1
    rows = world.gather([each, room])
    if not any(each for each, _ in rows):
        return 0
    most = min(int(room * STATE_SHARE) // each for each, room in rows if each)
    if any(each * least > room for each, room in rows):
        each, room = max(rows, key=lambda row: row[0] * least - row[1])
        fits = max(0, room // each - 1)
        remedy = f"--parallel {fits} would fit" if fits else "use more ranks on more hosts"
        raise CapacityError(
            f"the states of --parallel {config.parallel} sequences and a snapshot need {gigabytes(each * least)} on a "
            f"rank, and {gigabytes(max(0, room))} are free after its weights: {remedy}"
        )
    return max(least, min(STATES_EACH * config.parallel, most))
