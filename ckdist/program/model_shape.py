"""The fields of a model that programs need, as protocols. `ModelSpec`, which is on a higher floor, implements them."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np


class Rotation(Protocol):
    """A rotary position embedding. `RopeSpec` implements it."""

    @property
    def inverse_frequencies(self) -> np.ndarray:
        """Float32 (rotated dimensions / 2,)."""
        ...

    @property
    def magnitude(self) -> float:
        """The factor on cos and sin."""
        ...

    @property
    def interleaved(self) -> bool:
        """True if pairs (2i, 2i + 1) are rotated, not (i, i + dims / 2)."""
        ...

    @property
    def axes(self) -> tuple[int, ...]:
        """For each pair the axis, 0 to 2, of the position that rotates it. Empty: positions have one axis."""
        ...


class ModelShape(Protocol):
    """A decoder or an encoder."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embeddings."""
        ...

    @property
    def hidden_size(self) -> int:
        """Elements of a hidden state."""
        ...

    @property
    def ropes(self) -> Mapping[str, Rotation]:
        """The rotations by name."""
        ...
