"""The packed shards of all ranks of a host, which each of these ranks maps.

Decode reads only the rank's own shard. A program whose tokens are sharded reads whole matrices through the shards of
all ranks. Nothing is copied: mapping costs a rank only page tables. Parts that a rank has not packed yet are read by
the others from their own mappings of the files.
"""

from collections.abc import Mapping
from typing import Any

from ckdist.comm.world_protocol import World
from ckdist.native import address
from ckdist.program.lowered import MatrixKey, VectorKey
from ckdist.weights.handles import MatrixHandle, VectorHandle
from ckdist.weights.loader import ShardLoader


class HostShards:
    """Finds parts of weights that any rank of the host loads. The constructor is a collective call of all ranks.

    Addresses are valid while this object and the loader live.

    Args:
        world: All ranks of the job.
        loader: This rank's loader, opened with `shared`, before it packs anything.
        matrices: Its handles by the keys of the lowered decode program.
        vectors: Its handles by the keys of the lowered decode program.
    """

    def __init__(
        self,
        world: World,
        loader: ShardLoader,
        matrices: Mapping[MatrixKey, MatrixHandle],
        vectors: Mapping[VectorKey, VectorHandle],
    ):
        self._loader = loader
        own = [
            [[*key, handle.place, handle.columns] for key, handle in matrices.items()],
            [[*key, handle.place] for key, handle in vectors.items()],
        ]
        rows = world.gather([loader.path, loader.planned_bytes, *own])
        others = [r for r, host in enumerate(world.hosts) if host == world.hosts[world.rank] and r != world.rank]
        self._peers = {rank: loader.add_peer(*rows[rank][:2]) for rank in others}
        self._own = dict(matrices)
        # part of a weight -> (rank, place there, its columns); this rank is preferred
        self._places: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._addresses: dict[tuple[Any, ...], int] = {}
        for rank in (world.rank, *others):
            for name, row_range, columns, stack, place, stored in rows[rank][2]:
                key = MatrixKey(name, tuple(row_range), tuple(columns), stack and tuple(stack))
                self._places.setdefault(key, (rank, place, stored))
            for name, local_range, place in rows[rank][3]:
                self._places.setdefault((name, tuple(local_range)), (rank, place))
        world.gather(None)  # barrier: an arena's path exists only as long as its rank

    def matrix(self, key: MatrixKey) -> int:
        """The address of the native `struct ckdist_matrix`."""
        if key not in self._addresses:
            rank, place, stored = self._places[key]
            if rank not in self._peers:
                self._addresses[key] = self._own[key].address
            else:
                peer = self._peers[rank]
                matrix = self._loader.add_peer_matrix(peer, key.name, key.rows, stored, place, key.matrices)
                self._addresses[key] = address(matrix)
        return self._addresses[key]

    def vector(self, name: str, local_range: tuple[int, int]) -> int:
        """The address of the first float."""
        rank, offset = self._places[name, local_range]
        arena = self._loader.peer_arena(self._peers[rank]) if rank in self._peers else self._loader.arena
        return address(arena) + offset
