"""Named float32 arrays that lie in one piece of memory, so that the optimizer and the reduction of gradients are one
pass each.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from ckdist.program.lowered_training import ALIGNMENT
from ckdist.program.program import Weight


def shape_of(weight: Weight) -> tuple[int, ...]:
    """The shape of a weight, of whose dimensions all are known."""
    return tuple(d.elements for d in weight.dims)


class Arena(Mapping[str, np.ndarray]):
    """`flat` is float32 (elements,); `arena[name]` is a view of it.

    What lies between arrays, up to a cache line, stays zero.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], flat: np.ndarray | None = None) -> None:
        """`flat`: memory of the right size to lie in; default: new, zeros."""
        self.shapes = dict(shapes)
        self.places: dict[str, tuple[int, int]] = {}  # name -> [begin, end) in flat
        at = 0
        for name, shape in self.shapes.items():
            size = int(np.prod(shape, dtype=np.int64))
            self.places[name] = at, at + size
            at += -(-size // ALIGNMENT) * ALIGNMENT
        self.flat = np.zeros(at, np.float32) if flat is None else flat
        assert self.flat.shape == (at,) and self.flat.dtype == np.float32
        self._views = {
            name: self.flat[begin:end].reshape(self.shapes[name]) for name, (begin, end) in self.places.items()
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)
