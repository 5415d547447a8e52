"""The cache of a layer, as its mixer describes it: paged arrays per token, and state arrays per sequence."""

from dataclasses import dataclass

from ckdist.layout import Dim


@dataclass(frozen=True)
class CacheArray:
    """One array of a cache. It has the items of `dim`, of `dim.width` elements each, and is sharded as `dim` is.

    Attributes:
        values: The first `values` elements of each key are also its value. 0 if values are an array of their own.
    """

    name: str  # k, v, latent
    dim: Dim
    values: int = 0


@dataclass(frozen=True)
class CacheSpec:
    """`paged` arrays have a row per token, in blocks; `state` arrays are one per sequence, in float32."""

    paged: tuple[CacheArray, ...] = ()
    state: tuple[CacheArray, ...] = ()
