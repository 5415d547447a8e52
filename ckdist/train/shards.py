"""This rank's shard of every weight, and the assembly of whole weights from shards."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from ckdist.comm.communicator import Communicator
from ckdist.errors import ConfigError
from ckdist.mesh import Mesh
from ckdist.program.program import Weight
from ckdist.train.arena import Arena, shape_of

GATHER_TAG = 1001
Shapes = dict[str, tuple[int, ...]]
Shaped: TypeAlias = Callable[[Shapes], Shapes]


class Shards:
    """Weights that the axis `tp` of a mesh shards.

    Args:
        weights: This stage's weights.
        stages: The weights of each stage. Default: one stage.

    Raises:
        ConfigError: A rank would have no part of a weight.
    """

    def __init__(self, weights: Sequence[Weight], mesh: Mesh, stages: Sequence[Sequence[Weight]] = ()) -> None:
        self.weights, self.mesh = {w.name: w for w in weights}, mesh
        self.stages = stages or (weights,)
        places = mesh.along("tp")
        for weight in weights:
            for dim in weight.dims:
                if any(dim.local(place) == 0 for place in places):
                    raise ConfigError(
                        f"tensor_parallel_size ({len(places)}) is too large for {dim.name} of {weight.name}: "
                        f"it has {dim.elements} elements in pieces of {dim.unit * dim.width}; "
                        "set a smaller one"
                    )

    @property
    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the whole weights of all stages, by name."""
        return {w.name: shape_of(w) for stage in self.stages for w in stage}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of this rank's shards, by name."""
        return _shapes(tuple(self.weights.values()), self.mesh)

    @property
    def replicated(self) -> list[str]:
        """The weights that every rank of a stage holds whole."""
        return [name for name, w in self.weights.items() if all(dim.axis is None for dim in w.dims)]

    @property
    def tied(self) -> list[str]:
        """The weights that the first and the last stage both hold, in the order of the first."""
        if len(self.stages) == 1:
            return []
        last = {w.name for w in self.stages[-1]}
        return [w.name for w in self.stages[0] if w.name in last]

    def spans(self, name: str) -> tuple[tuple[int, int], ...]:
        """The range of each dimension of a weight that this rank holds."""
        return tuple(dim.span(self.mesh) for dim in self.weights[name].dims)

    def slices(self, name: str) -> list[tuple[slice, ...]]:
        """The slices of a whole weight that each tensor-parallel rank holds."""
        return [_spans(self.weights[name], place) for place in self.mesh.along("tp")]

    def part(self, name: str, whole: np.ndarray) -> np.ndarray:
        """This rank's shard of a whole weight, as a view."""
        return whole[_spans(self.weights[name], self.mesh)]

    def gather(self, own: Arena, replica: Communicator | None, make: Callable[[Shapes], Arena]) -> Arena | None:
        """Assembles the whole weights from the shards of a replica, on its first rank. Returns None on others.

        A collective call of the replica. `make`: makes arenas of the whole weights and of a shard.
        """
        if replica is None:
            return own
        if replica.rank:
            replica.send(own.flat, 0, GATHER_TAG)
            return None
        whole = make(self.whole_shapes)
        for rank, place in enumerate(Mesh(self.mesh.axes, rank) for rank in self.mesh.group("pp", "tp")):
            weights, part = self.stages[place.index("pp")], own
            if rank:
                part = make(_shapes(weights, place))
                replica.recv(part.flat, rank, GATHER_TAG)
            for weight in weights:
                whole[weight.name][_spans(weight, place)] = part[weight.name]
        return whole


def _shapes(weights: Sequence[Weight], place: Mesh) -> dict[str, tuple[int, ...]]:
    """The shapes of the shards of the rank at `place`."""
    return {w.name: tuple(d.local(place) for d in w.dims) for w in weights}


def _spans(weight: Weight, place: Mesh) -> tuple[slice, ...]:
    """The slices of a whole weight that the rank at `place` holds."""
    return tuple(slice(*dim.span(place)) for dim in weight.dims)
