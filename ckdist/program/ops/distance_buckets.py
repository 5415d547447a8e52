"""Buckets of the distances between query and key, for relative biases."""

import numpy as np

from ckdist.program.ops.op_types import Attrs


def buckets_by_distance(attrs: Attrs) -> list[int]:
    """The bucket of each distance from -`distance` to `distance`."""
    return bucket_of(np.arange(-attrs["distance"], attrs["distance"] + 1), attrs).tolist()


def bucket_of(distances: np.ndarray, attrs: Attrs) -> np.ndarray:
    """The bucket of each distance = key position - query position. Raffel et al. 2020, arXiv:1910.10683, section 2.1.

    Each of the first half of the buckets has one distance. The other half is logarithmic up to `distance`. If attention
    is bidirectional, half of the buckets are for keys before the query, the other half for keys after it.
    """
    count, both = attrs["buckets"], attrs.get("bidirectional", False)
    buckets, after = (count // 2, (distances > 0) * (count // 2)) if both else (count, 0)
    away = np.abs(distances) if both else np.maximum(-distances, 0)
    single = buckets // 2
    share = np.log(np.maximum(away, 1).astype(np.float32) / np.float32(single))
    share = share / np.float32(np.log(attrs["distance"] / single)) * np.float32(buckets - single)
    grown = np.minimum(single + share.astype(np.int64), buckets - 1)
    return after + np.where(away < single, away, grown)
