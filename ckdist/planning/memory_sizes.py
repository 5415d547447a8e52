"""Sizes of caches and states, and checks that they fit into memory."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ckdist import native
from ckdist.config.engine_config import EngineConfig
from ckdist.errors import CapacityError, ConfigError
from ckdist.layout import Layout, Sharding
from ckdist.mesh import Mesh
from ckdist.models.spec import ModelSpec
from ckdist.program.cache import CacheSpec
from ckdist.program.executable import KV_TYPES, block_bytes

RESERVE = 256 << 20  # bytes per rank for everything that is neither weights nor cache


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a rank's weights."""

    total: int
    experts: int = 0  # bytes of experts, a part of `total`

    def __str__(self) -> str:
        if not self.experts:
            return gigabytes(self.total)
        rest = gigabytes(self.total - self.experts)
        return f"{gigabytes(self.total)} (experts {gigabytes(self.experts)}, others {rest})"


def gigabytes(n: float) -> str:
    """Formats bytes in KiB, MiB or GiB."""
    return f"{n / 2**30:.2f} GiB" if n >= 2**28 else f"{n / 2**20:.1f} MiB" if n >= 2**20 else f"{n / 2**10:.1f} KiB"


def cache_types(config: EngineConfig) -> dict[str, str]:
    """The types of keys and values, by the names of cached arrays. Raises ConfigError for an unknown type."""
    types = {"k": config.cache_type_k, "v": config.cache_type_v}
    for name, kind in types.items():
        if kind not in KV_TYPES:
            raise ConfigError(f"--cache-type-{name} {kind} is not known: use one of {', '.join(KV_TYPES)}")
    return types


def cache_name(types: Mapping[str, str]) -> str:
    """The types of keys and values as "K/V", or once if they are equal."""
    return "/".join(dict.fromkeys(types.values()))


def cache_bytes_per_block(spec: ModelSpec, layout: Layout, mesh: Mesh, types: Mapping[str, str]) -> int:
    """Bytes of one block of BLOCK_TOKENS positions on this rank, for all layers."""
    sharding, total = Sharding(layout, mesh), 0
    for cache in _caches(spec, sharding):
        if not (paged := cache.paged):
            continue
        keys, *values = paged
        begin, end = keys.dim.share(mesh)
        if keys.values:
            each = block_bytes(types["k"], types["k"], keys.dim.width, keys.values, latent=True)
        else:
            each = block_bytes(types["k"], types["v"], keys.dim.width, values[0].dim.width)
        total += (end - begin) * each
    return total


def _caches(spec: ModelSpec, sharding: Sharding) -> list[CacheSpec]:
    """The caches of all layers. An encoder's layers use the caches of the decoder's layers with the same index."""
    layers = [*spec.layers, *(spec.encoder.layers[len(spec.layers) :] if spec.encoder else ())]
    return [cache for layer in layers for cache in layer.caches(sharding)]


def rope_bytes_per_position(spec: ModelSpec) -> int:
    """Bytes of cosines and sines for one position, in all tables of the model."""
    return sum(4 * rope.dims for rope in spec.ropes.values())


def state_bytes(spec: ModelSpec, layout: Layout, mesh: Mesh) -> int:
    """Bytes of one sequence's states on this rank, for all layers."""
    sharding = Sharding(layout, mesh)
    arrays = [array for cache in _caches(spec, sharding) for array in cache.state]
    return sum(4 * array.dim.local(mesh) for array in arrays)


def free_memory(ranks_on_host: int) -> int:
    """Bytes of free memory per rank of this host, without those that the rank's loaded models will still touch."""
    promised = native.lib.ckdist_promised_memory()
    return native.lib.ckdist_available_memory() // ranks_on_host - promised - RESERVE


def require(needed: Mapping[str, int], ranks_on_host: int, remedy: str) -> None:
    """Raises CapacityError, with the sum and its parts, if they exceed the free memory of this rank."""
    free, total = free_memory(ranks_on_host), sum(needed.values())
    if total > free:
        parts = ", ".join(f"{gigabytes(size)} of {name}" for name, size in needed.items() if size)
        raise CapacityError(f"training needs {gigabytes(total)} on each rank ({parts}), and {_room(free)}: {remedy}")


def _room(free: int) -> str:
    """Describes the free memory of a rank for an error message."""
    rest = f"{gigabytes(free + RESERVE)} of memory less {gigabytes(RESERVE)} for everything else"
    return f"{gigabytes(max(0, free))} are free for it ({rest})"


def too_large(rank: int, ranks: tuple[int, int], weights: WeightBytes, cache: int, free: int) -> CapacityError:
    """Returns the error for weights that leave no memory for a cache, with a remedy.

    `ranks`: (number of all ranks, of this host's ranks). `cache`: bytes of the smallest cache. `free`: free bytes of
    this rank.
    """
    size, on_host = ranks
    sums = f"the weights of rank {rank} take {weights}, and its cache at least {gigabytes(cache)}, but {_room(free)}"
    if free <= cache:
        return CapacityError(f"{sums}: use more ranks on more hosts or a smaller quantisation")
    hosts = math.ceil(weights.total * size / ((free - cache) * on_host))
    files = gigabytes((free - cache) * size)
    return CapacityError(
        f"{sums}: {hosts} such hosts would hold the model, or take a smaller quantisation, of at most {files}"
    )
