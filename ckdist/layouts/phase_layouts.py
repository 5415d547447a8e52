"""The layouts of prefill and decode for a model on the ranks of a world.

Decode is tensor-parallel over all ranks. Prefill may be token-parallel if ranks share memory, because they then read
each other's shards. On several hosts it may be token-parallel inside each host and tensor-parallel over hosts.
`prefill` chooses the number of tokens from which on that layout is used.
"""

import logging
from typing import TYPE_CHECKING

from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.errors import ConfigError
from ckdist.layout import SINGLE, TENSOR, TOKEN, TOKEN_IN_HOSTS, Layout, with_whole_experts
from ckdist.mesh import HOST, LOCAL, WHOLE, Mesh
from ckdist.models.spec import Attention, LatentAttention, Mixer, ModelSpec, MoeFfn

if TYPE_CHECKING:  # few models have experts
    from ckdist.comm.transports.link import Link

log = logging.getLogger(__name__)


def layouts_for(
    config: EngineConfig, world: World, spec: ModelSpec | None = None, link: "Link | None" = None
) -> tuple[Layout, Layout, Mesh]:
    """The layouts of prefill and decode, and the mesh. All ranks run both.

    Args:
        config: The settings.
        world: The ranks.
        spec: The model. None: a model that any layout suits.
        link: The link between hosts, for `--experts auto`. None: NOMINAL_LINK.

    Raises:
        ConfigError: --prefill token is not possible, or --tensor-parallel-size is not the number of ranks.
    """
    if config.tensor_parallel_size not in (0, world.size):
        stages = " in each stage" if config.pipeline_parallel_size > 1 else ""
        raise ConfigError(
            f"--tensor-parallel-size {config.tensor_parallel_size} needs that number of ranks{stages}, and there are "
            f"{world.size}: start {config.tensor_parallel_size}, or leave the flag out"
        )
    prefill, decode, mesh = _layouts(config, world, spec)
    if spec is None or not places_experts(world, spec):
        return prefill, decode, mesh
    whole, reason = _placement(config, world, spec, link)
    if world.rank == 0:
        log.debug("experts: %s", reason)
    if not whole:
        return prefill, decode, mesh
    in_hosts = not _apart(world)
    if in_hosts:
        mesh = _mesh_of_hosts(world)
    by_experts = with_whole_experts(decode, in_hosts)
    return by_experts if prefill is decode else with_whole_experts(prefill, in_hosts), by_experts, mesh


def norms_groups(mixer: "Mixer | None") -> bool:
    """True if the results of a mixer's heads are normed together: Mamba-2 with a norm."""
    return bool(getattr(getattr(mixer, "mamba", mixer), "norm_groups", 0))


def shares_key(mixer: "Mixer | None") -> bool:
    """True if all heads share one key of a token: latent attention, compressed entries, and an index of blocks."""
    indexed = isinstance(mixer, Attention) and mixer.indexer is not None
    return indexed or isinstance(mixer, LatentAttention) or type(mixer).__name__ == "CompressedAttention"


def places_experts(world: World, spec: ModelSpec) -> bool:
    """True if the placement of experts is a choice: the model has experts, and there are several hosts."""
    return len(set(world.hosts)) > 1 and any(isinstance(layer.ffn, MoeFfn) for layer in spec.layers)


def can_dispatch(world: World, prefill: Layout) -> bool:
    """True if rows can be dispatched to the hosts of their experts: whole experts, and equal hosts."""
    return "experts" in prefill.sharded_by and _are_equal_hosts(world)


def _are_equal_hosts(world: World) -> bool:
    """True if all hosts have the same number of ranks, in consecutive order."""
    return world.size == len(set(world.hosts)) or not _apart(world)


def _placement(config: EngineConfig, world: World, spec: ModelSpec, link: "Link | None") -> tuple[bool, str]:
    """(whether hosts have whole experts, the reason): by --experts, or predicted with `link`."""
    if config.experts != "auto":
        named = {"tensor": "slices of every expert on every rank", "expert": "whole experts on each host"}
        return config.experts == "expert", f"{named[config.experts]}, as --experts says"
    from ckdist.comm.thresholds import Thresholds
    from ckdist.comm.transports.link import NOMINAL_LINK
    from ckdist.layouts.expert_placement import choose_placement

    rows = min(config.ubatch_size or spec.usual_ubatch, config.batch_size)
    direct_bytes = Thresholds().transport_direct_bytes
    hosts = len(set(world.hosts))
    return choose_placement(spec, world.size, hosts, link or NOMINAL_LINK, rows, direct_bytes, _are_equal_hosts(world))


def _mesh_of_hosts(world: World) -> Mesh:
    """The mesh hosts x ranks of a host. All hosts have the same number of ranks."""
    return Mesh({HOST: len(set(world.hosts)), LOCAL: world.local_size}, world.rank)


def _layouts(config: EngineConfig, world: World, spec: ModelSpec | None) -> tuple[Layout, Layout, Mesh]:
    """`layouts_for` with slices of each expert on all ranks."""
    mesh = Mesh({WHOLE: world.size}, world.rank)
    if world.size == 1:
        return SINGLE, SINGLE, mesh
    by_token, apart = TOKEN, ""
    if spec is not None and any(type(layer.mixer).__name__ == "Mamba1" for layer in spec.layers):
        apart = f"{spec.family} makes the steps of its states from all channels, which needs sums over ranks"
    elif len(set(world.hosts)) > 1:
        by_token, apart = TOKEN_IN_HOSTS, _apart(world)
        if (
            not apart
            and spec is not None
            and any(isinstance(layer.mixer, Attention) and layer.mixer.qk_norm == "row" for layer in spec.layers)
        ):
            apart = f"{spec.family} norms all heads of a token together, which needs sums over hosts"
        elif not apart and spec is not None and any(norms_groups(layer.mixer) for layer in spec.layers):
            apart = f"{spec.family} norms groups of heads together, which needs sums over hosts"
        elif not apart and spec is not None and any(shares_key(layer.mixer) for layer in spec.layers):
            apart = f"{spec.family} has keys that all heads share, and each host caches all its tokens"
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


def _apart(world: World) -> str:
    """The reason why ranks on several hosts cannot shard tokens inside each host; "" if they can."""
    hosts = list(dict.fromkeys(world.hosts))
    counts = [world.hosts.count(host) for host in hosts]
    if max(counts) == 1:
        return f"these are on {len(hosts)} hosts"
    return uneven(world)


def uneven(world: World) -> str:
    """The reason why hosts and ranks do not form a grid; "" if they do."""
    hosts = list(dict.fromkeys(world.hosts))
    counts = [world.hosts.count(host) for host in hosts]
    if len(set(counts)) > 1:
        ranks = ", ".join(map(str, counts))
        return f"these are on {len(hosts)} hosts with {ranks} ranks each; start equal numbers on all hosts"
    if list(world.hosts) != [host for host in hosts for _ in range(counts[0])]:
        return "the ranks of a host do not follow one another; let the launcher fill one host after the other"
    return ""
