"""From a model, a world and a machine to one plan: the layout of each phase, how much cache there is, which threads
run.

Decode is tensor-parallel over all ranks. Prefill may be token-parallel where the ranks share memory and so can read
each other's shards, and on several hosts token-parallel inside of each and tensor-parallel over them; from how many
tokens on is chosen later (`engine/prefill.py`).
"""

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckdist import native, topology
from ckdist.config import EngineConfig
from ckdist.errors import CapacityError, ConfigError
from ckdist.layout import SINGLE, TENSOR, TOKEN, TOKEN_IN_HOSTS, WHOLE, Layout, Mesh, Sharding
from ckdist.models.spec import ModelSpec
from ckdist.program.batch import BLOCK_TOKENS
from ckdist.program.executable import KV_TYPES, CacheConfig, block_bytes

if TYPE_CHECKING:
    from ckdist.comm.protocol import World

log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 8192  # tokens of one sequence, where the model allows more and the user did not say
KV_SHARE = 0.5  # of the memory left beside the weights that the caches of several sequences may take unasked
RESERVE = 256 << 20  # bytes per rank for everything that is neither weights nor cache

# polls of a flag before a thread sleeps: some 100 µs, longer than a barrier of ranks that have cores of their own
SPINS = 20000
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
        threads = f"{self.threads} threads ({self.threads_batch} with prompts)"
        return f"{layout}; {threads}; {kv}; context {self.cache.context_length}"


def gigabytes(n: float) -> str:
    """Bytes as a text in the unit that suits them."""
    return f"{n / 2**30:.2f} GiB" if n >= 2**28 else f"{n / 2**20:.1f} MiB" if n >= 2**20 else f"{n / 2**10:.1f} KiB"


def layouts_for(config: EngineConfig, world: "World", spec: ModelSpec | None = None) -> tuple[Layout, Layout, Mesh]:
    """The layouts of prefill and decode of a model; every rank takes part in both. None: of one that any layout suits.

    ConfigError where --prefill token is impossible.
    """
    mesh = Mesh({WHOLE: world.size}, world.rank)
    if world.size == 1:
        return SINGLE, SINGLE, mesh
    by_token, apart = TOKEN, ""
    if len(set(world.hosts)) > 1:
        by_token, apart = TOKEN_IN_HOSTS, _apart(world)
        if not apart and spec is not None and any(layer.mixer.qk_norm == "row" for layer in spec.layers):
            apart = f"{spec.family} norms all heads of a token together, whose sums go over hosts"
    elif config.transport != "auto":
        apart = f"--transport {config.transport} is used instead of it"
    if apart and config.prefill == "token":
        raise ConfigError(f"--prefill token needs ranks that share memory, and {apart}: use --prefill auto or tensor")
    if apart and config.prefill == "auto" and world.rank == 0:
        log.debug("prefill is tensor-parallel: token-parallel needs ranks that share memory, and %s", apart)
    if apart or config.prefill == "tensor":
        return TENSOR, TENSOR, mesh
    if by_token is TOKEN_IN_HOSTS:
        mesh = Mesh({"host": len(set(world.hosts)), "local": world.local_size}, world.rank)
    return by_token, TENSOR, mesh


def _apart(world: "World") -> str:
    """Why the ranks of several hosts cannot shard tokens inside each host; "" where they can."""
    hosts = list(dict.fromkeys(world.hosts))
    counts = [world.hosts.count(host) for host in hosts]
    if max(counts) == 1:
        return f"these are on {len(hosts)} hosts"
    if len(set(counts)) > 1:
        ranks = ", ".join(map(str, counts))
        return f"these are on {len(hosts)} hosts with {ranks} ranks each; start as many on every host"
    if list(world.hosts) != [host for host in hosts for _ in range(counts[0])]:
        return "the ranks of a host do not follow one another; let the launcher fill one host after the other"
    return ""


def cache_types(config: EngineConfig) -> dict[str, str]:
    """The types of keys and values, by the names of a layer's cached arrays. ConfigError for one that is not known."""
    types = {"k": config.cache_type_k, "v": config.cache_type_v}
    for name, kind in types.items():
        if kind not in KV_TYPES:
            raise ConfigError(f"--cache-type-{name} {kind} is not known: use one of {', '.join(KV_TYPES)}")
    return types


def cache_name(types: Mapping[str, str]) -> str:
    """The types of keys and values in a line: once where they are the same."""
    return "/".join(dict.fromkeys(types.values()))


def cache_bytes_per_block(spec: ModelSpec, layout: Layout, mesh: Mesh, types: Mapping[str, str]) -> int:
    """Bytes that one block of BLOCK_TOKENS positions takes on this rank, over all layers."""
    sharding, total = Sharding(layout, mesh), 0
    for layer in spec.layers:
        keys, values = layer.mixer.cache(sharding).paged
        begin, end = keys.dim.share(mesh)
        total += (end - begin) * block_bytes(types[keys.name], types[values.name], keys.dim.width, values.dim.width)
    return total


def rope_bytes_per_position(spec: ModelSpec) -> int:
    """Bytes of the cosines and sines of one position, over all tables of the model."""
    return sum(4 * rope.dims for rope in spec.ropes.values())


def make_plan(
    config: EngineConfig,
    spec: ModelSpec,
    world: "World",
    weight_bytes: int,
    layouts: tuple[Layout, Layout, Mesh],
) -> Plan:
    """The plan for this rank; a collective call, every rank gets the same cache.

    `weight_bytes`: what this rank's shard takes; `layouts`: from `layouts_for`. Raises CapacityError when weights or
    cache do not fit the memory that is free, with what would.
    """
    prefill, layout, mesh = layouts
    threads = config.threads or topology.default_threads(world)
    threads_batch = config.threads_batch or threads
    placement = topology.place(world, max(threads, threads_batch))
    types = cache_types(config)
    per_block = cache_bytes_per_block(spec, layout, mesh, types)
    free = native.lib.ckdist_available_memory() // world.local_size - RESERVE
    room = free - weight_bytes
    if room < per_block:
        raise CapacityError(
            f"the weights of rank {world.rank} take {gigabytes(weight_bytes)}, but {gigabytes(max(0, free))} are free "
            "for it: use more ranks on more hosts or a smaller quantisation"
        )
    context = config.ctx_size or min(spec.max_position, DEFAULT_CONTEXT)
    if context > spec.max_position:
        raise CapacityError(
            f"--ctx-size {context} is more than the {spec.max_position} positions of the model: "
            f"--ctx-size {spec.max_position} is its longest"
        )
    rope = rope_bytes_per_position(spec)
    limit = config.kv_memory or sys.maxsize
    budget = max(0, min(room - context * rope, limit))
    wanted = context if config.ctx_size or config.kv_memory else BLOCK_TOKENS
    # blocks of one sequence
    longest = min(room // (per_block + BLOCK_TOKENS * rope), limit // per_block if per_block else sys.maxsize)
    needed = -(-context // BLOCK_TOKENS) * per_block
    needed, there = (needed, limit) if needed > limit else (needed + context * rope, room)
    most = budget // per_block * BLOCK_TOKENS if per_block else sys.maxsize
    rows = world.gather([most, needed, there, longest * BLOCK_TOKENS, int(placement.crowded)])
    most, needed, there, *_ = min(rows)  # of the rank that has the least room
    longest, crowded = min(row[3] for row in rows), any(row[4] for row in rows)
    if most < wanted:
        remedy = (
            f"--ctx-size {longest} would fit"
            if longest
            else f"give --kv-memory at least {per_block}, which holds {BLOCK_TOKENS} tokens"
        )
        raise CapacityError(
            f"one sequence of --ctx-size {context} needs {gigabytes(needed)} for its {cache_name(types)} cache "
            f"on each rank, and {gigabytes(there)} are there for it: {remedy}"
        )
    # All sequences at full length, if memory allows; what is given with --kv-memory is used whole.
    total = most if config.kv_memory else min(config.parallel * context, max(context, int(most * KV_SHARE)), most)
    context = min(context, total)
    blocks = -(-total // BLOCK_TOKENS)
    most_tokens = min(config.ubatch_size, config.batch_size)
    cache_config = CacheConfig(most_tokens, config.parallel, context, blocks, types["k"], types["v"])
    return Plan(
        mesh,
        prefill,
        layout,
        cache_config,
        threads,
        threads_batch,
        SPINS_CROWDED if crowded else SPINS,
        placement,
        max(0, free),
    )
