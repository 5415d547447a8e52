"""What programs ask of a model's description. A `ModelSpec` has it all; these are the names that lie below it."""

from typing import Protocol

import numpy as np

from ckdist.layout import DecoderSizes


class Rotation(Protocol):
    """A rotary position embedding, as a `RopeSpec` describes it."""

    @property
    def inverse_frequencies(self) -> np.ndarray:
        """Float32 (head_dim / 2,)."""
        ...

    @property
    def magnitude(self) -> float:
        """The factor on cos and sin."""
        ...


class DecoderSpec(DecoderSizes, Protocol):
    """A dense decoder: its sizes, its layers, and their rotations."""

    @property
    def num_layers(self) -> int:
        """Layers."""
        ...

    @property
    def rope(self) -> Rotation:
        """The rotation of layers that see everything."""
        ...

    @property
    def rope_local(self) -> Rotation | None:
        """The rotation of sliding layers where it differs, else None."""
        ...
