"""The states of optimizers, whose arrays may have shapes of their own, and updates of one whole parameter."""

import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ckdist import native
from ckdist.native import CData
from ckdist.train import muon
from ckdist.train.arena import NARROW, Arena, widened
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


def state_shapes(optim: str, state: str, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shapes of a state's arrays, of parameters with these `shapes`."""
    return {name: state_shape(optim, state, shape) for name, shape in shapes.items()}


def state_floats(optim: str, states: Iterable[str], shapes: Mapping[str, Shape]) -> int:
    """The float32 numbers of all states of parameters."""
    return sum(Arena.size(state_shapes(optim, state, shapes).values()) for state in states)


def is_decayed(name: str, shape: Shape) -> bool:
    """True if weight decay applies: to matrices and kernels of convolutions, not to norms, biases and rates."""
    return (len(shape) > 1 or is_kernel(name)) and not name.endswith("bias")


def is_kernel(name: str) -> bool:
    """True for the weights of a short convolution, which are an array of one dimension."""
    return re.search(r"conv\w*\.weight$", name) is not None


def rounding(
    seed: int, name: str, shape: Shape, spans: tuple[tuple[int, int], ...] = (), first: int = 0
) -> dict[str, int]:
    """The `struct ckdist_rounding` of a part of a bfloat16 weight, for its random rounding.

    The random number of an element depends only on the seed, the step and its place in the whole weight. So a result
    depends neither on ranks and threads nor on a stop.

    Args:
        seed: The training's.
        name: The weight's.
        shape: The whole weight's.
        spans: The range of each dimension in this rank's shard. Default: all.
        first: The element of the shard that the part begins with.
    """
    rows, stacks = (1, *shape)[-2], shape[:-2]
    spans = spans or tuple((0, size) for size in shape)
    (row, row_end), (column, column_end) = ((0, 1), *spans)[-2:]
    before = spans[0][0] * math.prod(stacks[1:]) if stacks else 0  # matrices
    return {
        "key": zlib.crc32(f"{seed} {name}".encode()),
        "first": first,
        "rows": row_end - row,
        "columns": column_end - column,
        "whole_rows": rows,
        "first_row": before * rows + row,
        "first_column": column,
    }


def update_parameter(
    handle: CData,
    config: TrainConfig,
    name: str,
    values: np.ndarray,
    gradient: np.ndarray,
    states: Sequence[np.ndarray],
    numbers: Mapping[str, Any],
) -> None:
    """Updates one whole parameter.

    Args:
        states: Its states, in the order of `STATES`.
        numbers: The numbers of the update (`ckdist_update`).
    """
    c, shape, is_matrix = config, values.shape, values.ndim > 1
    own: dict[str, Any] = {"ends": np.array([values.size]), "parts": 1, "n": values.size, "gradients": gradient}
    own["decays"] = np.array([is_decayed(name, shape)], np.uint8)
    if values.dtype == NARROW:
        own |= {"narrow": values, "rounding": [rounding(c.seed, name, shape)]}
    else:
        own["parameters"] = values
    if c.optim == "muon" and muon.is_matrix(name, shape):
        scale, rate = numbers["gradient_scale"], numbers["learning_rate"]
        floats = widened(values)
        muon.update(floats, gradient, states[0], scale, rate, c.muon_momentum, c.weight_decay)
        if floats is not values:
            native.call(lib.ckdist_optimizer_round, handle, {**numbers, **own}, floats)
        return
    betas = [c.adam_beta1, c.adam_beta2, c.adam_epsilon]
    if c.optim == "adafactor":
        beta = 1 - float(numbers["step"]) ** ADAFACTOR_DECAY
        stack = [math.prod(shape[:-2]), shape[-2]] if is_matrix else [1, 1]
        call, more = lib.ckdist_optimizer_adafactor, [*stack, beta, states[0], states[1] if is_matrix else None]
    elif c.optim == "adamw_8bit":
        mean, mean_scale, square, square_scale = states
        codes = [mean.view(np.uint8), mean_scale, square.view(np.uint8), square_scale]
        call, more = lib.ckdist_optimizer_adamw_8bit, [*betas, *codes]
    else:  # parameters that Muon leaves to AdamW
        call, more = lib.ckdist_optimizer_adamw, [*betas, *states]
    native.call(call, handle, {**numbers, **own}, *more)
