"""The weights of a host, once: every rank's packed shard, mapped by all of the host's ranks.

Decode reads a rank's own shard; a program whose tokens are cut reads whole matrices through everybody's. Nothing is copied: what a
rank adds are page tables. It does not load, and does not know which shard goes where in a matrix.
"""

from collections.abc import Sequence

from ckdist.native import check, ffi, lib
from ckdist.program.lower import Lowered
from ckdist.weights.loader import MatrixHandle, ShardLoader, VectorHandle


class HostShards:
    """Finds any part of a weight that some rank of the host has loaded. A collective call of all ranks of the world.

    `loader` has loaded to be shared; `matrices` and `vectors` are its handles of what `lowered` names. Addresses are valid while the
    object lives.
    """

    def __init__(self, world, loader: ShardLoader, lowered: Lowered, matrices: Sequence[MatrixHandle], vectors: Sequence[VectorHandle]):
        self._loader = loader
        own = [
            [[name, rows, columns, handle.place] for (name, rows, columns), handle in zip(lowered.matrices, matrices, strict=True)],
            [[name, share, handle.place] for (name, share), handle in zip(lowered.vectors, vectors, strict=True)],
        ]
        rows = world.gather([loader.path, loader.planned_bytes, *own])
        others = [r for r, host in enumerate(world.hosts) if host == world.hosts[world.rank] and r != world.rank]
        self._arenas = {rank: _open(*rows[rank][:2]) for rank in others}
        self._places: dict[tuple, tuple] = {}  # part of a weight -> rank and place there, the own rank first
        self._structs: dict[tuple, object] = {}
        for rank in (world.rank, *others):
            for name, row_range, columns, place in rows[rank][2]:
                self._places.setdefault((name, tuple(row_range), tuple(columns)), (rank, place))
            for name, share, place in rows[rank][3]:
                self._places.setdefault((name, tuple(share)), (rank, place))
        world.gather(None)  # a rank that leaves early takes its arena's path with it

    def matrix(self, name: str, rows: tuple[int, int], columns: tuple[int, int]) -> int:
        """The address of the native `struct ckdist_matrix`."""
        key = name, rows, columns
        if key not in self._structs:
            rank, (type_number, row_count, column_count, tile_bytes, offset) = self._places[key]
            self._structs[key] = ffi.new("struct ckdist_matrix *", [type_number, row_count, column_count, tile_bytes, self._base(rank) + offset])
        return int(ffi.cast("intptr_t", self._structs[key]))

    def vector(self, name: str, share: tuple[int, int]) -> int:
        """The address of the first float."""
        rank, offset = self._places[name, share]
        return int(ffi.cast("intptr_t", self._base(rank) + offset))

    def _base(self, rank: int):
        arena = self._arenas.get(rank)
        return ffi.cast("uint8_t *", self._loader.arena if arena is None else lib.ckdist_peer_arena_data(arena))


def _open(path: str, size: int):
    out = ffi.new("ckdist_peer_arena **")
    check(lib.ckdist_peer_arena_open(ffi.new("char[]", path.encode()), size, out))
    return ffi.gc(out[0], lib.ckdist_peer_arena_close)
