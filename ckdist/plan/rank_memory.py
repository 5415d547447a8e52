"""Predicts the memory of one serving rank by purpose, from its lowered programs and the caches of the spec.

It does not depend on this machine. `ckdist.layouts.memory_sizes` has the parts that a real start uses too.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

from ckdist import native
from ckdist.layouts.memory_sizes import RESERVE
from ckdist.models.decoder import MAPPED
from ckdist.models.moe_weights import is_expert
from ckdist.models.spec import ModelSpec
from ckdist.plan.cost import REPLICATED_ROWS, TILE_ROWS
from ckdist.program.cache import CacheTypes, block_bytes, slot_bytes
from ckdist.program.lowered import SLOTS, Lowered
from ckdist.program.program import Program
from ckdist.program.rotations import rope_bytes_per_position
from ckdist.program.step_batch import BLOCK_TOKENS


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank."""

    weights: int
    experts: int  # part of `weights`
    cache: int
    states: int
    activations: int
    buffers: int
    process: int = RESERVE  # Python, libraries and all small parts

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(self)) - self.experts


@dataclass(frozen=True)
class Wanted:
    """The sizes of a job."""

    context: int
    sequences: int
    cache: CacheTypes


def tile_bytes(kind: int, begin: int, end: int) -> int:
    """Bytes of TILE_ROWS rows of a matrix of the ggml type `kind`, from column `begin` to `end`, in whole blocks."""
    block = native.lib.ckdist_type_undivided_columns(kind)
    width = -(-end // block) * block - begin // block * block
    return native.check(native.lib.ckdist_tile_bytes(native.ffi.NULL, kind, width))


def weights_bytes(lowered: Lowered, program: Program, packed: Callable[[str], int]) -> tuple[int, int]:
    """Bytes of this rank's packed matrices, in tiles of 16 rows, and vectors: (all, those of experts).

    `packed(name)` is the ggml type of a matrix.
    """
    stacks = {w.name: w.dims[0].count for w in program.weights if len(w.dims) > 2}
    total, experts, bytes_of = 0, 0, functools.cache(tile_bytes)  # matrices of all layers are alike
    for key in dict.fromkeys(lowered.matrices):
        rows, columns = key.rows[1] - key.rows[0], key.columns
        if key.name in MAPPED or columns[1] <= columns[0]:
            continue
        count = key.matrices[1] - key.matrices[0] if key.matrices else stacks.get(key.name, 1)
        size = -(-rows // TILE_ROWS) * count * bytes_of(packed(key.name), *columns)
        total += size
        experts += size if is_expert(key.name) else 0
    for name, (begin, end) in dict.fromkeys(lowered.vectors):
        size = 4 * (end - begin)
        total += size
        experts += size if is_expert(name) else 0
    return total, experts


def rank_memory(
    spec: ModelSpec,
    plans: list[tuple[Program, Lowered]],
    packed: Callable[[str], int],
    wanted: Wanted,
    threads: int,
) -> RankMemory:
    """The memory of a rank. `plans`: programs and lowered forms, decode's first."""
    program, lowered = plans[0]
    caches = lowered.caches.values()
    blocks = -(-wanted.context // BLOCK_TOKENS) * wanted.sequences
    rope = rope_bytes_per_position(spec) * wanted.context
    exchanged = 4 * SLOTS * max(one.exchange_floats for _, one in plans)
    logits = 4 * spec.vocab_size * wanted.sequences
    widest = max((b.width for b in lowered.buffers if b.place == "activations"), default=0)
    own = (
        threads
        * REPLICATED_ROWS
        * sum(native.check(native.lib.ckdist_activation_bytes(form, widest)) for form in range(3))
    )
    weights, experts = weights_bytes(lowered, program, packed)
    return RankMemory(
        weights=weights,
        experts=experts,
        cache=block_bytes(caches, wanted.cache) * blocks,
        states=slot_bytes(caches) * (wanted.sequences + 1),
        activations=max(one.arena_bytes for _, one in plans),
        buffers=rope + exchanged + logits + own,
    )
