"""Bytes of a model's caches and states on a rank."""

from collections.abc import Mapping

from ckdist.layout import Layout, Sharding
from ckdist.mesh import Mesh
from ckdist.models.spec import ModelSpec
from ckdist.program.cache import CacheSpec
from ckdist.program.executable import block_bytes


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
