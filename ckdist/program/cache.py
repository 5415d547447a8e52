"""The cache of a layer on a rank: named arrays, with rows per token in blocks or rows per sequence in slots.

The native executor places the same list (`struct ckdist_layer`), so it alone computes bytes.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ckdist import native
from ckdist.layout import Dim, even_ranges
from ckdist.mesh import Mesh

KV_TYPES = native.numbers("ckdist_cache_type", "ckdist_cache_")
LATENT_GROUP = 8  # heads that read a latent vector together

CacheTypes: TypeAlias = tuple[str, str]  # of keys, of values


@dataclass(frozen=True)
class CacheArray:
    """One array on a rank, (heads, rows, width) for each token or sequence: `struct ckdist_cache_array`."""

    name: str  # of `enum ckdist_array`
    heads: int
    width: int
    rows: int = 1
    lifetime: str = "token"  # of `enum ckdist_lifetime`

    def fields(self, types: CacheTypes) -> dict[str, Any]:
        """The fields of a `struct ckdist_cache_array`. Arrays of sequences are in f32, some of tokens in f32 or f16.

        An index is in i16 if the cache has integers.
        """
        kind = "f32" if self.lifetime == "sequence" and self.name != "latent" else types[self.name == "values"]
        if self.name.endswith(("index", "entries")) and kind != "f32":
            kind = "i16" if self.name == "index" and kind not in ("f16", "bf16") else "f16"
        return {**vars(self), "type": KV_TYPES[kind]}


@dataclass(frozen=True)
class LayerCache:
    """The arrays of a layer's cache, and the heads that read them: `struct ckdist_layer`."""

    arrays: tuple[CacheArray, ...]

    # Attention. For each kv-head of this rank: number of its query heads here. Latent attention has groups of heads
    # that read the cached vectors together, in place of kv-heads.
    heads_per_kv: tuple[int, ...] = ()
    total_heads: int = 0  # on all ranks
    total_kv_heads: int = 0  # on all ranks
    first_head: int = 0
    # index of each kv-head in the row of a token's rank; that row has a kv-head twice if ranks replicate it
    key_places: tuple[int, ...] = ()

    # Linear attention. For each value head: the local key head that it reads.
    key_head_of: tuple[int, ...] = ()

    def with_index(self, index: "LayerCache | None") -> "LayerCache":
        """This cache and the array of `index_cache`, if the layer has one."""
        return self if index is None else replace(self, arrays=(*self.arrays, *index.arrays))

    def fields(self, types: CacheTypes) -> dict[str, Any]:
        """The fields of a `struct ckdist_layer`."""
        return {
            **vars(self),
            "arrays": [array.fields(types) for array in self.arrays],
            "array_count": len(self.arrays),
            "kv_heads": len(self.heads_per_kv),
        }


def attention_cache(heads: Dim, keys: Dim, values: Dim, mesh: Mesh) -> LayerCache:
    """Keys and values of each token, for grouped-query attention on a rank of `mesh`."""
    group, (begin, end), kv_heads = heads.count // keys.count, heads.share(mesh), range(*keys.share(mesh))
    arrays = [CacheArray(name, len(kv_heads), dim.width) for name, dim in (("keys", keys), ("values", values))]
    each = (min(end, (kv + 1) * group) - max(begin, kv * group) for kv in kv_heads)
    return LayerCache(tuple(arrays), tuple(each), heads.count, keys.count, begin)


def latent_cache(heads: Dim, key_width: int, rank: int, mesh: Mesh) -> LayerCache:
    """The latent vector (`rank` elements) and the rotated key of each token, on all ranks that have a head.

    A thread computes a group of heads.
    """
    begin, end = heads.share(mesh)
    count = -(-(end - begin) // LATENT_GROUP)
    groups = tuple(stop - start for start, stop in even_ranges(end - begin, count)) if count else ()
    arrays = CacheArray("latent", min(count, 1), rank), CacheArray("rope", min(count, 1), key_width - rank)
    return LayerCache(arrays if key_width > rank else arrays[:1], groups, heads.count, 1, begin)


def index_cache(keys: Dim) -> LayerCache:
    """The key of each token that chooses positions for sparse attention, on every rank."""
    return LayerCache((CacheArray("index", 1, keys.elements),))


def state_cache(keys: Dim, values: Dim, taps: int, key_head_of: tuple[int, ...]) -> LayerCache:
    """A state of each value head, and the inputs of its short convolutions of `taps` tokens, for each sequence."""
    heads, channels = len(key_head_of), 2 * keys.width + values.width
    arrays = (
        CacheArray("state", heads, values.width, keys.width, "sequence"),
        CacheArray("convolution", heads, channels, taps - 1, "sequence"),
    )
    return LayerCache(arrays, key_head_of=key_head_of)


@functools.cache
def cache_bytes(layer: LayerCache, lifetime: str, types: CacheTypes) -> int:
    """Bytes of a layer's arrays in a block of BLOCK_TOKENS positions ("token"), or in a slot ("sequence")."""
    arrays = [array.fields(types) for array in layer.arrays]
    return native.call(native.lib.ckdist_cache_bytes, arrays, len(arrays), lifetime)


def block_bytes(layers: Iterable[LayerCache], types: CacheTypes) -> int:
    """Bytes of a block of BLOCK_TOKENS positions, for all layers."""
    return sum(cache_bytes(layer, "token", types) for layer in layers)


def slot_bytes(layers: Iterable[LayerCache]) -> int:
    """Bytes of one sequence's states, for all layers."""
    return sum(cache_bytes(layer, "sequence", ("f32", "f32")) for layer in layers)
