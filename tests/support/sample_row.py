"""One row for the sampler without a sequence."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.sampling_state import SamplingState


class SampleRow(NamedTuple):
    params: SamplingParams
    seed: int = 0
    length: int = 0
    prompt: Sequence[int] | np.ndarray = ()
    output: Sequence[int] | np.ndarray = ()
    sampling_state: SamplingState | None = None
