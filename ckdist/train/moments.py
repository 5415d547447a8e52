"""Optimizers with small states: Adafactor, and AdamW with moments of 8 bits. They update one parameter after another.

Every replica holds the whole state. A state's arrays have shapes of their own.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ckdist import native
from ckdist.train.arena import Arena
from ckdist.train.config import TrainConfig

lib = native.lib
Shape = tuple[int, ...]
BLOCK, WORD = 256, 4  # codes of a scale; codes in a float32, since states are arrays of float32
ADAFACTOR_DECAY = -0.8  # the decay of the means in step t is 1 - t^this


def state_shape(optim: str, state: str, shape: Shape) -> Shape:
    """The shape of one state of a parameter with `shape`."""
    if optim == "adafactor":
        if len(shape) < 2:
            return shape if state == "exp_avg_sq_row" else (1,)  # not used
        return shape[:-1] if state == "exp_avg_sq_row" else (*shape[:-2], shape[-1])
    if optim == "adamw_8bit":
        size = math.prod(shape)
        return (-(-size // BLOCK),) if state.endswith("_scale") else (-(-size // WORD),)
    return shape


def state_floats(optim: str, states: Iterable[str], shapes: Mapping[str, Shape]) -> int:
    """The float32 numbers of all states of parameters."""
    return sum(Arena.size(state_shape(optim, state, shape) for shape in shapes.values()) for state in states)


def update_each(
    handle: Any,
    config: TrainConfig,
    parameters: Arena,
    gradients: Arena,
    state: Sequence[Arena],
    whole: dict[str, Any],
) -> None:
    """Updates all parameters. `whole` has the numbers of the update (`ckdist_update`)."""
    c = config
    for at, (name, shape) in enumerate(parameters.shapes.items()):
        values = parameters[name].reshape(-1)
        own = {"ends": np.array([values.size]), "decays": whole["decays"][at : at + 1], "parts": 1, "n": values.size}
        own |= {"parameters": values, "gradients": gradients[name].reshape(-1)}
        arrays = [arena[name].reshape(-1) for arena in state]
        if c.optim == "adafactor":
            rows, columns = arrays
            beta = 1 - float(whole["step"]) ** ADAFACTOR_DECAY
            is_matrix = len(shape) > 1
            stack = [math.prod(shape[:-2]), shape[-2]] if is_matrix else [1, 1]
            call, more = lib.ckdist_optimizer_adafactor, [*stack, beta, rows, columns if is_matrix else None]
        else:
            mean, mean_scale, square, square_scale = arrays
            codes = [mean.view(np.uint8), mean_scale, square.view(np.uint8), square_scale]
            call, more = lib.ckdist_optimizer_adamw_8bit, [c.adam_beta1, c.adam_beta2, c.adam_epsilon, *codes]
        native.call(call, handle, whole | own, *more)
