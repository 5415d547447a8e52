"""Which layouts a model can run in on the ranks of a world.

Decode is tensor-parallel over all ranks. Prefill may be token-parallel where the ranks share memory and so can read
each other's shards, and on several hosts token-parallel inside of each and tensor-parallel over them; from how many
tokens on is chosen later (`prefill`).
"""

import logging
from typing import TYPE_CHECKING

from ckdist.comm.thresholds import Thresholds
from ckdist.comm.transports.link import Link
from ckdist.config.engine import EngineConfig
from ckdist.errors import ConfigError
from ckdist.layout import SINGLE, TENSOR, TOKEN, TOKEN_IN_HOSTS, Layout, with_whole_experts
from ckdist.mesh import HOST, LOCAL, WHOLE, Mesh
from ckdist.models.spec import Attention, LatentAttention, ModelSpec, MoeFfn
from ckdist.planning.cost import WIRE, WIRE_SECONDS
from ckdist.planning.expert_placement import ExpertPlacement, choose_placement

if TYPE_CHECKING:
    from ckdist.comm.protocol import World

log = logging.getLogger(__name__)

NOMINAL_LINK = Link(WIRE_SECONDS, WIRE)


def layouts_for(
    config: EngineConfig, world: "World", spec: ModelSpec | None = None, link: Link = NOMINAL_LINK
) -> tuple[Layout, Layout, Mesh]:
    """The layouts of prefill and decode of a model; every rank takes part in both. None: of one that any layout suits.

    `link`: between hosts, by which `--experts auto` chooses. ConfigError where --prefill token is impossible, or
    --tensor-parallel-size is not the number of ranks.
    """
    if config.tensor_parallel_size not in (0, world.size):
        stages = " in each stage" if config.pipeline_parallel_size > 1 else ""
        raise ConfigError(
            f"--tensor-parallel-size {config.tensor_parallel_size} needs as many ranks{stages}, and there are "
            f"{world.size}: start as many, or leave the flag out"
        )
    prefill, decode, mesh = _layouts(config, world, spec)
    if spec is None or not places_experts(world, spec):
        return prefill, decode, mesh
    placement = _placement(config, world, spec, link)
    if world.rank == 0:
        log.debug("experts: %s", placement.reason)
    if not placement.whole:
        return prefill, decode, mesh
    in_hosts = not _apart(world)
    if in_hosts:
        mesh = _mesh_of_hosts(world)
    by_experts = with_whole_experts(decode, in_hosts)
    return by_experts if prefill is decode else with_whole_experts(prefill, in_hosts), by_experts, mesh


def places_experts(world: "World", spec: ModelSpec) -> bool:
    """Whether there is a choice where experts live: there are some, and several hosts."""
    return len(set(world.hosts)) > 1 and any(isinstance(layer.ffn, MoeFfn) for layer in spec.layers)


def can_dispatch(world: "World", prefill: Layout) -> bool:
    """Whether rows may go to the hosts that have their experts, where these are whole."""
    return "experts" in prefill.sharded_by and _are_alike(world)


def _are_alike(world: "World") -> bool:
    """Whether every host has a rank for each of another's."""
    return world.size == len(set(world.hosts)) or not _apart(world)


def _placement(config: EngineConfig, world: "World", spec: ModelSpec, link: Link) -> ExpertPlacement:
    """Whether hosts have whole experts, as --experts says or as `link` suggests."""
    if config.experts != "auto":
        named = {"tensor": "slices of every expert on every rank", "expert": "whole experts on each host"}
        return ExpertPlacement(config.experts == "expert", f"{named[config.experts]}, as --experts says")
    rows = min(config.ubatch_size, config.batch_size)
    direct_bytes = Thresholds().transport_direct_bytes
    return choose_placement(spec, world.size, len(set(world.hosts)), link, rows, direct_bytes, _are_alike(world))


def _mesh_of_hosts(world: "World") -> Mesh:
    """Ranks by host, of whom each has as many."""
    return Mesh({HOST: len(set(world.hosts)), LOCAL: world.local_size}, world.rank)


def _layouts(config: EngineConfig, world: "World", spec: ModelSpec | None) -> tuple[Layout, Layout, Mesh]:
    """As `layouts_for`, with slices of every expert on every rank."""
    mesh = Mesh({WHOLE: world.size}, world.rank)
    if world.size == 1:
        return SINGLE, SINGLE, mesh
    by_token, apart = TOKEN, ""
    if len(set(world.hosts)) > 1:
        by_token, apart = TOKEN_IN_HOSTS, _apart(world)
        if (
            not apart
            and spec is not None
            and any(isinstance(layer.mixer, Attention) and layer.mixer.qk_norm == "row" for layer in spec.layers)
        ):
            apart = f"{spec.family} norms all heads of a token together, whose sums go over hosts"
        elif not apart and spec is not None and any(isinstance(layer.mixer, LatentAttention) for layer in spec.layers):
            apart = f"{spec.family} has latent attention, of which every host caches all tokens"
        elif not apart and config.pipeline_parallel_size > 1:
            apart = "a stage is on several hosts"
    elif config.transport != "auto":
        apart = f"--transport {config.transport} is used instead of it"
    if apart and config.prefill == "token":
        raise ConfigError(f"--prefill token needs ranks that share memory, and {apart}: use --prefill auto or tensor")
    if apart and config.prefill == "auto" and world.rank == 0:
        log.debug("prefill is tensor-parallel: token-parallel needs ranks that share memory, and %s", apart)
    if apart or config.prefill == "tensor":
        return TENSOR, TENSOR, mesh
    if by_token is TOKEN_IN_HOSTS:
        mesh = _mesh_of_hosts(world)
    return by_token, TENSOR, mesh


def _apart(world: "World") -> str:
    """Why the ranks of several hosts cannot shard tokens inside each host; "" where they can."""
    hosts = list(dict.fromkeys(world.hosts))
    counts = [world.hosts.count(host) for host in hosts]
    if max(counts) == 1:
        return f"these are on {len(hosts)} hosts"
    return uneven(world)


def uneven(world: "World") -> str:
    """In what hosts differ, of whose ranks each would be one of a grid; "" where they do not."""
    hosts = list(dict.fromkeys(world.hosts))
    counts = [world.hosts.count(host) for host in hosts]
    if len(set(counts)) > 1:
        ranks = ", ".join(map(str, counts))
        return f"these are on {len(hosts)} hosts with {ranks} ranks each; start as many on every host"
    if list(world.hosts) != [host for host in hosts for _ in range(counts[0])]:
        return "the ranks of a host do not follow one another; let the launcher fill one host after the other"
    return ""
