"""The state of one rank for the ops' references: its coordinates, its cache and its step."""

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Dim, Range
from ckdist.mesh import Mesh
from ckdist.program.model_shape import ModelShape, Rotation
from ckdist.program.program import Weight


class RankContext:
    """The rank that a reference runs on."""

    def __init__(self, mesh: Mesh, spec: ModelShape):
        self.mesh, self.spec = mesh, spec
        self.states: dict[tuple[int, str], np.ndarray] = {}  # (layer, name) -> state or rows of the sequence
        self.positions = np.zeros(0, np.int_)  # position in its sequence, for each token of the step
        self.axes: np.ndarray | None = None  # (tokens, 3): positions of three axes, for rotations; None: of one
        self.first_token = 0  # index of this rank's first token in the step; not 0 only if tokens are sharded
        self.first_text: int | None = None  # tokens of the first text if the sequence is a pair of texts
        self.logits_indices = np.zeros(0, np.int_)  # indices of the step's tokens whose logits are needed
        self.input_rows = np.zeros((0, 0), np.float32)  # (tokens, hidden): rows of hidden states of the step's tokens
        self.received: dict[int, list[np.ndarray]] = {}  # stage -> the values that it has sent
        self.starts = np.zeros(1, np.int32)  # first token of each packed sequence, and the end of the last

    def share(self, dim: Dim) -> Range:
        """The items [begin, end) of a dimension that this rank has."""
        return dim.share(self.mesh)

    def rows(self, axis: str | None, count: int) -> Range:
        """The rows [begin, end) that this rank has, of `count` rows sharded over `axis`."""
        return self.share(Dim("tokens", count, axis=axis))

    def adds_bias(self, in_dim: Dim) -> bool:
        """True if this rank adds a linear's bias. If the result is partial, only the first rank does."""
        return in_dim.axis is None or self.mesh.index(in_dim.axis) == 0

    def rope(self, table: str) -> Rotation:
        """The rotation of this name. Raises LayoutError if the model lacks it."""
        rope = self.spec.ropes.get(table)
        if rope is None:
            raise LayoutError(f"the model has no rotation {table!r}; it has {', '.join(self.spec.ropes) or 'none'}")
        return rope

    def rope_tables(self, rope: Rotation) -> tuple[np.ndarray, np.ndarray]:
        """Cos and sin of the step's positions: float32 (tokens, rotated dimensions / 2) each."""
        positions = self.positions[:, None] if self.axes is None or not rope.axes else self.axes[:, rope.axes]
        angles = positions.astype(np.float32) * rope.inverse_frequencies.astype(np.float32)
        return np.cos(angles) * np.float32(rope.magnitude), np.sin(angles) * np.float32(rope.magnitude)

    def extended(self, layer: int, name: str, rows: np.ndarray) -> np.ndarray:
        """Appends the step's rows to those of the sequence; returns all."""
        before = self.states.get((layer, name), rows[:0])
        self.states[layer, name] = np.concatenate([before, rows])
        return self.states[layer, name]

    def with_last(self, layer: int, name: str, rows: np.ndarray, count: int) -> np.ndarray:
        """The step's rows after the `count` rows before them; zeros before the sequence. Keeps the last `count`."""
        before = self.states.get((layer, name), np.zeros((count, *rows.shape[1:]), rows.dtype))
        both = np.concatenate([before, rows])
        self.states[layer, name] = both[len(both) - count :]
        return both

    def sequences(self) -> list[slice]:
        """The tokens of each packed sequence."""
        return [slice(begin, end) for begin, end in zip(self.starts[:-1], self.starts[1:], strict=True)]

    def slice(self, weight: Weight, array: np.ndarray) -> np.ndarray:
        """This rank's shard of a whole weight."""
        return array[tuple(slice(*dim.span(self.mesh)) for dim in weight.dims)].copy()
