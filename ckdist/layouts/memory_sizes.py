"""The memory of a rank, and the error if a model does not fit."""

import math
from dataclasses import dataclass

from ckdist import native
from ckdist.errors import CapacityError
from ckdist.program.cache import CacheTypes

RESERVE = 256 << 20  # bytes per rank for everything that is neither weights nor cache


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a rank's weights."""

    total: int
    experts: int = 0  # bytes of experts, a part of `total`
    kept: int = 0  # bytes of `total` that the last start has allocated

    def __str__(self) -> str:
        if not self.experts:
            return gigabytes(self.total)
        rest = gigabytes(self.total - self.experts)
        return f"{gigabytes(self.total)} (experts {gigabytes(self.experts)}, others {rest})"


def gigabytes(n: float) -> str:
    """Formats bytes in KiB, MiB or GiB."""
    return f"{n / 2**30:.2f} GiB" if n >= 2**28 else f"{n / 2**20:.1f} MiB" if n >= 2**20 else f"{n / 2**10:.1f} KiB"


def cache_name(types: CacheTypes) -> str:
    """The types of keys and values as "K/V", or once if they are equal."""
    return "/".join(dict.fromkeys(types))


def free_memory(ranks_on_host: int, limit: int | None = None, kept: int = 0) -> int:
    """Bytes of free memory per rank of this host, without those that the rank's loaded models will still touch.

    `limit`: most bytes of all ranks of this host (--memory). `kept`: allocated bytes of each rank that count as free.
    """
    promised = native.lib.ckdist_promised_memory()
    available = native.lib.ckdist_available_memory() + ranks_on_host * kept
    return min(available, available if limit is None else limit) // ranks_on_host - promised - RESERVE


def room(free: int) -> str:
    """Describes the free memory of a rank for an error message."""
    rest = f"{gigabytes(free + RESERVE)} of memory less {gigabytes(RESERVE)} for everything else"
    return f"{gigabytes(max(0, free))} are free for it ({rest})"


def too_large(rank: int, ranks: tuple[int, int], weights: WeightBytes, cache: int, free: int) -> CapacityError:
    """Returns the error for weights that leave no memory for a cache, with a remedy.

    `ranks`: (number of all ranks, of this host's ranks). `cache`: bytes of the smallest cache. `free`: free bytes of
    this rank.
    """
    size, on_host = ranks
    sums = f"the weights of rank {rank} take {weights}, and its cache at least {gigabytes(cache)}, but {room(free)}"
    if free <= cache:
        return CapacityError(f"{sums}: use more ranks on more hosts or a smaller quantisation")
    hosts = math.ceil(weights.total * size / ((free - cache) * on_host))
    files = gigabytes((free - cache) * size)
    return CapacityError(
        f"{sums}: {hosts} such hosts would hold the model, or take a smaller quantisation, of at most {files}"
    )
