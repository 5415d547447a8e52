"""One rank, as the ops' references see it: its place, its cache and its step."""

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Dim, Range
from ckdist.mesh import Mesh
from ckdist.program.model_shape import ModelShape, Rotation
from ckdist.program.program import Weight


class RankContext:
    """What the references ask about the rank they run on."""

    def __init__(self, mesh: Mesh, spec: ModelShape):
        self.mesh, self.spec = mesh, spec
        self.cache: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # layer -> K, V: (positions, kv_heads, head_dim)
        self.states: dict[tuple[int, str], np.ndarray] = {}  # (layer, name) -> what a sequence keeps beside its tokens
        self.positions = np.zeros(0, np.int_)  # of the step's tokens in their sequences
        self.first_token = 0  # of the step's tokens this rank's first, where they are sharded
        self.first_text: int | None = None  # of a sequence of two texts the tokens of the first
        self.logits_indices = np.zeros(0, np.int_)  # of the step's tokens, whose logits are wanted
        self.received: dict[int, list[np.ndarray]] = {}  # stage -> what it sends
        self.starts = np.zeros(1, np.int32)  # where the packed sequences begin, and where the last one ends

    def share(self, dim: Dim) -> Range:
        """This rank's items of a dimension, [begin, end)."""
        return dim.share(self.mesh)

    def rows(self, axis: str | None, count: int) -> Range:
        """Which of `count` rows sharded over `axis` are this rank's, [begin, end)."""
        return self.share(Dim("tokens", count, axis=axis))

    def adds_bias(self, in_dim: Dim) -> bool:
        """Whether this rank adds a linear's bias: all do where the result is whole, the first where it is partial."""
        return in_dim.axis is None or self.mesh.index(in_dim.axis) == 0

    def rope(self, table: str) -> Rotation:
        """The rotation of this name. LayoutError where the model lacks it."""
        rope = self.spec.ropes.get(table)
        if rope is None:
            raise LayoutError(f"the model has no rotation {table!r}; it has {', '.join(self.spec.ropes) or 'none'}")
        return rope

    def rope_tables(self, rope: Rotation) -> tuple[np.ndarray, np.ndarray]:
        """Cos and sin of the step's positions: float32 (tokens, rotated dimensions / 2) each."""
        angles = self.positions.astype(np.float32)[:, None] * rope.inverse_frequencies.astype(np.float32)
        return np.cos(angles) * np.float32(rope.magnitude), np.sin(angles) * np.float32(rope.magnitude)

    def extend_cache(self, layer: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All of a layer's keys and values with the step's, (positions, kv_heads, head_dim) each."""
        if layer in self.cache:
            k, v = np.concatenate([self.cache[layer][0], k]), np.concatenate([self.cache[layer][1], v])
        self.cache[layer] = k, v
        return k, v

    def sequences(self) -> list[slice]:
        """The tokens of each packed sequence."""
        return [slice(begin, end) for begin, end in zip(self.starts[:-1], self.starts[1:], strict=True)]

    def slice(self, weight: Weight, array: np.ndarray) -> np.ndarray:
        """This rank's part of a whole weight."""
        for axis, dim in enumerate(weight.dims):
            begin, end = dim.span(self.mesh)
            array = array.take(range(begin, end), axis=axis)
        return array
