"""ZeRO: the part of the trained parameters that each replica owns (Rajbhandari et al. 2020, arXiv:1910.02054)."""

from collections.abc import Mapping
from itertools import pairwise

from ckdist.layout import Range, even_ranges
from ckdist.train.arena import ALIGNMENT, Arena

ELEMENTWISE = ("adamw", "sgd")  # optimizers that update each element alone


def owned_ranges(optim: str, shapes: Mapping[str, tuple[int, ...]], ranks: int) -> list[Range]:
    """The floats [begin, end) of the parameters' arena that each rank owns: whole parameters if `optim` needs these."""
    size = Arena.size(shapes.values())
    if optim in ELEMENTWISE:
        return even_ranges(size, ranks, ALIGNMENT)
    starts = [*(begin for begin, _ in Arena.places_of(shapes).values()), size]
    edges = [min(starts, key=lambda start: abs(start - size * rank / ranks)) for rank in range(ranks + 1)]
    return list(pairwise(edges))
