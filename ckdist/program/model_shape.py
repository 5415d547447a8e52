"""What programs ask of a model's description. A `ModelSpec` has it all; these are the names that lie below it."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np


class Rotation(Protocol):
    """A rotary position embedding, as a `RopeSpec` describes it."""

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
        """Neighbours turn together, else halves."""
        ...


class ModelShape(Protocol):
    """A decoder or encoder: its vocabulary, its width and its rotations."""

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
