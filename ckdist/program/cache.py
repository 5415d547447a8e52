"""What a layer keeps between steps, as its mixer describes it: arrays per token in blocks, and arrays per sequence."""

from dataclasses import dataclass

from ckdist.layout import Dim


@dataclass(frozen=True)
class CacheArray:
    """One array of a cache: the items of `dim`, of `dim.width` elements each, sharded as `dim` is.

    `values`: so many of an item's first elements are the values of the keys that the items are; 0: values are another
    array.
    """

    name: str  # k, v, latent
    dim: Dim
    values: int = 0


@dataclass(frozen=True)
class CacheSpec:
    """`paged` arrays have a row per token, in blocks; `state` arrays are one per sequence, in float32."""

    paged: tuple[CacheArray, ...] = ()
    state: tuple[CacheArray, ...] = ()
