"""What a layer keeps between steps, as its mixer describes it: arrays per token in blocks, and arrays per sequence."""

from dataclasses import dataclass

from ckdist.layout import Dim


@dataclass(frozen=True)
class CacheArray:
    """One array of a cache: the items of `dim`, of `dim.width` elements each, sharded as `dim` is."""

    name: str  # k, v
    dim: Dim


@dataclass(frozen=True)
class CacheSpec:
    """`paged` arrays have a row per token, in blocks; `state` arrays are one per sequence, in float32."""

    paged: tuple[CacheArray, ...] = ()
    state: tuple[CacheArray, ...] = ()
