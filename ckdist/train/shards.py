"""Which part of every weight this rank holds, and how parts become whole weights and back."""

from collections.abc import Sequence

import numpy as np

from ckdist.comm.communicator import Communicator
from ckdist.errors import ConfigError
from ckdist.mesh import Mesh
from ckdist.program.program import Weight
from ckdist.train.arena import Arena, shape_of

GATHER_TAG = 1001


class Shards:
    """Of `weights`, whose dimensions the axis `tp` of the mesh shards."""

    def __init__(self, weights: Sequence[Weight], mesh: Mesh) -> None:
        """ConfigError where a rank would have nothing of a weight."""
        self.weights, self.mesh = {w.name: w for w in weights}, mesh
        self.places = mesh.along("tp")
        for weight in weights:
            for dim in weight.dims:
                if any(dim.local(place) == 0 for place in self.places):
                    raise ConfigError(
                        f"tensor_parallel_size ({len(self.places)}) is more than what {dim.name} of {weight.name} "
                        f"can be divided into: it has {dim.elements} elements in pieces of {dim.unit * dim.width}; "
                        "set a smaller one"
                    )

    @property
    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the weights that all ranks together hold, by name."""
        return {name: shape_of(w) for name, w in self.weights.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of this rank's parts, by name."""
        return self._shapes(self.mesh)

    @property
    def replicated(self) -> list[str]:
        """The weights that every rank of a replica holds whole."""
        return [name for name, w in self.weights.items() if all(dim.axis is None for dim in w.dims)]

    def part(self, name: str, whole: np.ndarray) -> np.ndarray:
        """This rank's part of a whole weight; a view."""
        return whole[self._spans(name, self.mesh)]

    def gather(self, own: Arena, tensor: Communicator | None) -> Arena | None:
        """The whole weights, of the replica's parts; None but on its first rank. A collective call of the replica."""
        if tensor is None:
            return own
        if tensor.rank:
            tensor.send(own.flat, 0, GATHER_TAG)
            return None
        whole = Arena(self.whole_shapes)
        for rank, place in enumerate(self.places):
            part = own
            if rank:
                part = Arena(self._shapes(place))
                tensor.recv(part.flat, rank, GATHER_TAG)
            for name, view in part.items():
                whole[name][self._spans(name, place)] = view
        return whole

    def _shapes(self, place: Mesh) -> dict[str, tuple[int, ...]]:
        """Of the parts of the rank at `place`."""
        return {name: tuple(d.local(place) for d in w.dims) for name, w in self.weights.items()}

    def _spans(self, name: str, place: Mesh) -> tuple[slice, ...]:
        """Where the part of the rank at `place` lies in a whole weight."""
        return tuple(slice(*dim.span(place)) for dim in self.weights[name].dims)
