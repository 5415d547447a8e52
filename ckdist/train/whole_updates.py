"""Updates that need whole parameters: Muon, Adafactor, and AdamW with moments of 8 bits.

Each parameter has one keeper among the tensor-parallel ranks, which holds its whole state. In a round, every rank
receives the shards of one parameter and of its gradient, updates it, and returns the shards. So an update does not
depend on the number of ranks.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ckdist.comm.communicator import Communicator
from ckdist.layout import Range
from ckdist.native import CData
from ckdist.train.arena import Arena, assign, widened
from ckdist.train.config import TrainConfig
from ckdist.train.moments import state_shapes, update_parameter
from ckdist.train.ownership import kept_shapes, rounds
from ckdist.train.shards import Shards


class Whole(NamedTuple):
    """A parameter and its gradient (float32), of one shape."""

    values: np.ndarray
    gradient: np.ndarray


class WholeUpdates:
    """The updates of the parameters that this rank keeps.

    Args:
        parameters: This rank's shards.
        own: The floats of `parameters` that this replica updates: whole parameters.
        shards: The places of the shards, if there are tensor-parallel ranks.
        tensor: The tensor-parallel ranks.
        handle: The native optimizer.

    Attributes:
        shapes: The whole shapes of the parameters that this rank keeps.
    """

    def __init__(
        self,
        config: TrainConfig,
        parameters: Arena,
        own: Range,
        shards: Shards | None,
        tensor: Communicator | None,
        handle: CData,
    ) -> None:
        self.config, self.parameters, self.shards, self.tensor, self.handle = config, parameters, shards, tensor, handle
        self.begin = own[0]
        self.shapes = kept_shapes(parameters.shapes, own, shards)
        self._rounds = rounds(parameters.shapes, own, shards) if shards else []
        self._alone = [name for name in self.shapes if shards is None or name in shards.replicated]

    def update(self, gradient: np.ndarray, numbers: Mapping[str, Any], states: Mapping[str, np.ndarray]) -> None:
        """Updates the parameters of this replica. A collective call of the tensor-parallel ranks.

        Args:
            gradient: The gradients of the floats that this replica updates.
            numbers: The numbers of the update (`ckdist_update`).
            states: Arenas of the states of the parameters that this rank keeps.
        """
        optim = self.config.optim
        arenas = [Arena(state_shapes(optim, name, self.shapes), flat) for name, flat in states.items()]

        def updated(name: str, one: Whole) -> None:
            of = [arena[name].reshape(-1) for arena in arenas]
            update_parameter(self.handle, self.config, name, *one, of, numbers)

        for name in self._alone:
            updated(name, self._shard(name, gradient))
        for names in self._rounds:
            one = self._gathered(names, gradient)
            if one is not None and self.tensor is not None:
                updated(names[self.tensor.rank], one)
            self._scattered(names, one)

    def _shard(self, name: str, gradient: np.ndarray) -> Whole:
        """This rank's shard."""
        begin, end = (edge - self.begin for edge in self.parameters.places[name])
        values = self.parameters[name]
        return Whole(values, gradient[begin:end].reshape(values.shape))

    def _gathered(self, names: tuple[str, ...], gradient: np.ndarray) -> Whole | None:
        """The whole parameter that this rank keeps in a round. `names`: that of each rank; empty: none."""
        assert self.tensor is not None and self.shards is not None, "there are rounds"
        shards = [part for name in names if name for part in self._shard(name, gradient)]
        counts = [2 * self.parameters[name].size if name else 0 for name in names]
        own = names[self.tensor.rank]
        places = self.shards.slices(own) if own else []
        shape = self.shapes[own] if own else 0
        whole = Whole(np.empty(shape, self.parameters.flat.dtype), np.empty(shape, np.float32))
        sizes = [whole.values[place].size for place in places] or [0] * self.tensor.size
        found = self.tensor.all_to_all(_joined(shards), counts, [2 * size for size in sizes])
        for place, pieces in zip(places, np.split(found, 2 * np.cumsum(sizes)[:-1]), strict=False):
            for array, piece in zip(whole, np.split(pieces, 2), strict=True):
                assign(array[place], piece.reshape(array[place].shape))
        return whole if own else None

    def _scattered(self, names: tuple[str, ...], whole: Whole | None) -> None:
        """Stores this rank's shards of the parameters that the ranks have updated in a round."""
        assert self.tensor is not None and self.shards is not None, "there are rounds"
        own = names[self.tensor.rank]
        parts = [whole.values[place] for place in self.shards.slices(own)] if whole is not None else []
        sizes = [part.size for part in parts] or [0] * self.tensor.size
        counts = [self.parameters[name].size if name else 0 for name in names]
        found = self.tensor.all_to_all(_joined(parts), sizes, counts)
        for name, piece in zip(names, np.split(found, np.cumsum(counts)[:-1]), strict=True):
            if name:
                assign(self.parameters[name], piece.reshape(self.parameters.shapes[name]))


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """The elements of some arrays, float32 (elements,)."""
    return np.concatenate([np.zeros(0, np.float32), *(widened(array).reshape(-1) for array in arrays)])
