"""The rank that owns a trained parameter: its part of a replica (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054), and
its keeper among tensor-parallel ranks for an optimizer that needs whole parameters.
"""

import math
from collections.abc import Mapping
from itertools import accumulate, pairwise, zip_longest
from typing import TypeAlias

from ckdist.layout import Range, even_ranges
from ckdist.train.arena import ALIGNMENT, Arena
from ckdist.train.shards import Shards

ELEMENTWISE = ("adamw", "sgd")  # optimizers that update each element alone
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def owned_ranges(optim: str, shapes: Shapes, ranks: int, shards: Shards | None = None) -> list[Range]:
    """The floats [begin, end) of the parameters' arena that each rank owns: whole parameters if `optim` needs these.

    `shards`: the places of the shards. All ranks of a replica own the same parameters.
    """
    size = Arena.size(shapes.values())
    if optim in ELEMENTWISE:
        return even_ranges(size, ranks, ALIGNMENT)
    whole = shards.whole_shapes if shards else shapes
    ends = [0, *accumulate(Arena.size([whole[name]]) for name in shapes)]
    starts = [*(begin for begin, _ in Arena.places_of(shapes).values()), size]
    nearest = lambda place: min(range(len(ends)), key=lambda at: abs(ends[at] - place))
    edges = [starts[nearest(ends[-1] * rank / ranks)] for rank in range(ranks + 1)]
    return list(pairwise(edges))


def keepers(shapes: Shapes, own: Range, shards: Shards) -> dict[str, int]:
    """The tensor-parallel rank that keeps each parameter in the floats `own`: the first for one that all ranks hold,
    else the one with the least to keep.
    """
    whole, replicated = shards.whole_shapes, set(shards.replicated)
    loads = [0] * shards.mesh.axes.get("tp", 1)
    found: dict[str, int] = {}
    for name, (begin, _) in Arena.places_of(shapes).items():
        if own[0] <= begin < own[1]:
            found[name] = 0 if name in replicated else loads.index(min(loads))
            loads[found[name]] += Arena.size([whole[name]])
    return found


def kept_shapes(shapes: Shapes, own: Range, shards: Shards | None) -> dict[str, tuple[int, ...]]:
    """The whole shapes of the parameters that a rank keeps."""
    if shards is None:
        return {name: shapes[name] for name, (begin, _) in Arena.places_of(shapes).items() if own[0] <= begin < own[1]}
    rank, whole = shards.mesh.index("tp"), shards.whole_shapes
    return {name: whole[name] for name, keeper in keepers(shapes, own, shards).items() if keeper == rank}


def rounds(shapes: Shapes, own: Range, shards: Shards) -> list[tuple[str, ...]]:
    """The sharded parameters that tensor-parallel ranks exchange together, one for each keeper; empty: none."""
    replicated = set(shards.replicated)
    by_rank: list[list[str]] = [[] for _ in shards.mesh.along("tp")]
    for name, rank in keepers(shapes, own, shards).items():
        if name not in replicated:
            by_rank[rank].append(name)
    return list(zip_longest(*by_rank, fillvalue=""))


def exchanged_floats(shapes: Shapes, own: Range, shards: Shards) -> int:
    """Most floats of a rank while it receives a parameter and its gradient from the ranks of a round."""
    whole, rank, most = shards.whole_shapes, shards.mesh.index("tp"), 0
    for names in rounds(shapes, own, shards):
        sent = sum(math.prod(shapes[name]) for name in names if name)
        kept = math.prod(whole[names[rank]]) if names[rank] else 0
        most = max(most, 2 * kept + 2 * max(kept, sent))
    return most
