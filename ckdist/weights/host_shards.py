"""The weights of a host, once: every rank's packed shard, mapped by all of the host's ranks.

Decode reads a rank's own shard; a program whose tokens are sharded reads whole matrices through everybody's. Nothing is
copied: what a rank adds are page tables. What a rank has not packed yet the others read from their own mappings of the
files. It does not load, and does not know which shard goes where in a matrix.
"""

from collections.abc import Mapping
from typing import Any

from ckdist.comm.protocol import World
from ckdist.native import ffi
from ckdist.program.lowered import MatrixKey, VectorKey
from ckdist.weights.handles import MatrixHandle, VectorHandle
from ckdist.weights.loader import ShardLoader


class HostShards:
    """Finds any part of a weight that some rank of the host has loaded. A collective call of all ranks of the world.

    `loader` is open to be shared, and nothing is filled yet; `matrices` and `vectors` are its handles, by the
    keys of the lowered program that decodes. Addresses are valid while the object and the loader live.
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
        # part of a weight -> rank, place there and columns that it has, the own rank first
        self._places: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._addresses: dict[tuple[Any, ...], int] = {}
        for rank in (world.rank, *others):
            for name, row_range, columns, stack, place, stored in rows[rank][2]:
                key = MatrixKey(name, tuple(row_range), tuple(columns), stack and tuple(stack))
                self._places.setdefault(key, (rank, place, stored))
            for name, local_range, place in rows[rank][3]:
                self._places.setdefault((name, tuple(local_range)), (rank, place))
        world.gather(None)  # a rank that leaves early takes its arena's path with it

    def matrix(self, key: MatrixKey) -> int:
        """The address of the native `struct ckdist_matrix`."""
        if key not in self._addresses:
            rank, place, stored = self._places[key]
            if rank not in self._peers:
                self._addresses[key] = self._own[key].address
            else:
                peer = self._peers[rank]
                matrix = self._loader.add_peer_matrix(peer, key.name, key.rows, stored, place, key.matrices)
                self._addresses[key] = int(ffi.cast("intptr_t", matrix))
        return self._addresses[key]

    def vector(self, name: str, local_range: tuple[int, int]) -> int:
        """The address of the first float."""
        rank, offset = self._places[name, local_range]
        arena = self._loader.peer_arena(self._peers[rank]) if rank in self._peers else self._loader.arena
        return int(ffi.cast("intptr_t", ffi.cast("char *", arena) + offset))
