"""From a model, a world and a machine to one plan: the layout of each phase, how much cache there is, which threads
run.

It chooses no layout: `layouts` says which there are.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckdist import topology
from ckdist.config.engine import EngineConfig
from ckdist.errors import CapacityError
from ckdist.layout import Layout
from ckdist.mesh import WHOLE, Mesh
from ckdist.models.spec import ModelSpec
from ckdist.planning.memory import (
    WeightBytes,
    cache_bytes_per_block,
    cache_name,
    cache_types,
    free_memory,
    gigabytes,
    rope_bytes_per_position,
    state_bytes,
    too_large,
)
from ckdist.program.batch import BLOCK_TOKENS
from ckdist.program.executable import CacheConfig

if TYPE_CHECKING:
    from ckdist.comm.protocol import World

DEFAULT_CONTEXT = 8192  # tokens of one sequence, where the model allows more and the user did not say
ENCODER_CONTEXT = 2048  # the same of an encoder, whose buffers are for all of a sequence
KV_SHARE = 0.5  # of the memory left beside the weights that the caches of several sequences may take unasked
STATE_SHARE = 0.25  # of that memory for states of sequences beside those of sequences that run,
STATES_EACH = 4  # and how many of them there are for each of these at most

# polls of a flag before a thread sleeps: some 100 µs, longer than a barrier of ranks that have cores of their own
SPINS = 20000
SPINS_QUOTA = 2000  # some 10 µs: the time in which a thread waits counts towards a control group's quota
SPINS_CROWDED = 20  # where threads outnumber CPUs, a thread that waits must make room


@dataclass(frozen=True)
class Plan:
    """What one rank will do. The same on every rank but for `mesh.rank`, `placement` and `memory`."""

    mesh: Mesh
    prefill: Layout
    decode: Layout
    cache: CacheConfig
    threads: int
    threads_batch: int
    spins: int
    placement: topology.Placement
    memory: int  # bytes that were free for this rank

    @property
    def crowded(self) -> bool:
        """Some rank of the job has more threads than CPUs of its own."""
        return self.spins == SPINS_CROWDED

    def __str__(self) -> str:
        ranks = self.mesh.size(WHOLE)
        names = " and ".join(dict.fromkeys([self.decode.name, self.prefill.name]))
        layout = f"layouts {names} over {ranks} ranks" if ranks > 1 else "one rank"
        types = cache_name({"k": self.cache.key_type, "v": self.cache.value_type})
        kv = f"{self.cache.num_blocks * BLOCK_TOKENS} tokens of {types} cache in blocks of {BLOCK_TOKENS}"
        kv += f", {self.cache.state_slots} states" if self.cache.state_slots else ""
        threads = f"{self.threads} threads ({self.threads_batch} with prompts)"
        return f"{layout}; {threads}; {kv}; context {self.cache.context_length}"


def _context(config: EngineConfig, spec: ModelSpec) -> int:
    """Positions of one sequence that are wanted. CapacityError for more than the model has."""
    context = config.ctx_size or min(spec.max_position, ENCODER_CONTEXT if spec.reads_whole else DEFAULT_CONTEXT)
    if context > spec.max_position:
        raise CapacityError(
            f"--ctx-size {context} is more than the {spec.max_position} positions of the model: "
            f"--ctx-size {spec.max_position} is its longest"
        )
    return context


def step_tokens(config: EngineConfig, spec: ModelSpec) -> int:
    """Most tokens of a step. An encoder's sequences are each computed in one."""
    most = min(config.ubatch_size, config.batch_size)
    return max(most, config.ctx_size or min(spec.max_position, ENCODER_CONTEXT)) if spec.reads_whole else most


def _remedy(longest: int, per_block: int) -> str:
    """What helps where the cache is too small for one sequence; `longest`: positions that would fit."""
    if longest:
        return f"--ctx-size {longest} would fit"
    return f"give --kv-memory at least {per_block}, which holds {BLOCK_TOKENS} tokens"


def make_plan(
    config: EngineConfig,
    spec: ModelSpec,
    world: "World",
    weights: WeightBytes,
    layouts: tuple[Layout, Layout, Mesh],
) -> Plan:
    """The plan for this rank; a collective call, every rank gets the same cache.

    `weights`: what this rank's shard takes; `layouts`: from `layouts_for`. Raises CapacityError when weights or
    cache do not fit the memory that is free, with what would.
    """
    prefill, layout, mesh = layouts
    threads = config.threads or topology.default_threads(world)
    threads_batch = config.threads_batch or threads
    placement = topology.place(world, max(threads, threads_batch))
    types = cache_types(config)
    per_block = cache_bytes_per_block(spec, layout, mesh, types)
    free = free_memory(world.local_size)
    slots = _state_slots(config, world, state_bytes(spec, layout, mesh), free - weights.total)
    room = free - weights.total - slots * state_bytes(spec, layout, mesh)
    if room < per_block:
        raise too_large(world.rank, (world.size, world.local_size), weights, per_block, free)
    context = _context(config, spec)
    rope = rope_bytes_per_position(spec)
    limit = config.kv_memory or sys.maxsize
    budget = max(0, min(room - context * rope, limit))
    wanted = context if config.ctx_size or config.kv_memory else BLOCK_TOKENS
    # blocks of one sequence; a rank without kv-heads has none, and no rotation asks for memory in an encoder
    each = per_block + BLOCK_TOKENS * rope
    most_blocks = sys.maxsize // BLOCK_TOKENS
    longest = min(room // each if each else most_blocks, limit // per_block if per_block else most_blocks)
    needed = -(-context // BLOCK_TOKENS) * per_block
    needed, there = (needed, limit) if needed > limit else (needed + context * rope, room)
    most = budget // per_block * BLOCK_TOKENS if per_block else sys.maxsize
    spins = SPINS_CROWDED if placement.crowded else SPINS if placement.quota is None else SPINS_QUOTA
    rows = world.gather([most, needed, there, longest * BLOCK_TOKENS, spins])
    most, needed, there, *_ = min(rows)  # of the rank that has the least room
    longest, spins = min(row[3] for row in rows), min(row[4] for row in rows)
    if most < wanted:
        raise CapacityError(
            f"one sequence of --ctx-size {context} needs {gigabytes(needed)} for its {cache_name(types)} cache "
            f"on each rank, and {gigabytes(there)} are there for it: {_remedy(longest, per_block)}"
        )
    # All sequences at full length, if memory allows; what is given with --kv-memory is used whole.
    total = most if config.kv_memory else min(config.parallel * context, max(context, int(most * KV_SHARE)), most)
    most_tokens, sequences = step_tokens(config, spec), config.parallel
    if not spec.generates:  # of a step's sequences alone, which leave nothing behind
        sequences = max(sequences, most_tokens // BLOCK_TOKENS)
        total = min(total, most_tokens + sequences * BLOCK_TOKENS)
    context = min(context, total)
    blocks = -(-total // BLOCK_TOKENS)
    cache = CacheConfig(most_tokens, sequences, context, blocks, types["k"], types["v"], slots)
    return Plan(mesh, prefill, layout, cache, threads, threads_batch, spins, placement, max(0, free))


def _state_slots(config: EngineConfig, world: "World", each: int, room: int) -> int:
    """How many sequences' states there is place for, the same on every rank; 0: no layer keeps one. A collective call.

    each: bytes of one on this rank; room: bytes beside the weights. Every running sequence has one, and a snapshot has
    another. CapacityError where these do not fit.
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
            f"rank, and {gigabytes(max(0, room))} are there beside its weights: {remedy}"
        )
    return max(least, min(STATES_EACH * config.parallel, most))
