"""A model's weights as tensors of its family's safetensors files.

They have their stored names. Stacks of experts become one tensor per expert unless the family stores stacks, and the
keys' and values' matrices of latent attention become one tensor.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ckdist.models.families.family import TensorNames, stack_of
from ckdist.models.moe_weights import is_expert
from ckdist.models.registry import family
from ckdist.models.spec import ModelSpec
from ckdist.train.arena import widened
from ckdist.train.moments import is_kernel
from ckdist.weights.joined_rows import joined_rows
from ckdist.weights.stored_weights import heads_of, num_heads


class StoredTensor(NamedTuple):
    """A tensor of a file. `values()` makes its array, float32 or bfloat16, when it is written."""

    name: str
    shape: tuple[int, ...]
    values: Callable[[], np.ndarray]


def stored_tensors(spec: ModelSpec, weights: Mapping[str, np.ndarray]) -> Iterator[StoredTensor]:
    """The stored tensors of `weights`, which are whole and have their names in the program."""
    names = family(spec.family).safetensors
    if names.uses("stacked"):
        experts = {name: values for name, values in weights.items() if is_expert(name)}
        weights = {name: values for name, values in weights.items() if name not in experts}
        yield from _stacks(names, experts)
    stacks = {name: stack for name, stack in weights.items() if stack.ndim > 2}
    for name, stack in stacks.items():
        for index, matrix in enumerate(stack):
            yield StoredTensor(names.stored_matrix(name, index), matrix.shape, lambda matrix=matrix: matrix)
    for stored, parts in names.stored(name for name in weights if name not in stacks).items():
        arrays = [weights[part] for part in parts]
        if names.has("keys_values", stored):
            shape = (sum(array.size for array in arrays) // arrays[1].shape[1], arrays[1].shape[1])
            heads = num_heads(spec, parts[0])
            yield StoredTensor(stored, shape, lambda arrays=arrays, heads=heads: _kv_b(heads, *arrays))
        else:
            shape = (sum(array.shape[0] for array in arrays), *arrays[0].shape[1:])
            shape = (1, *shape) if names.has("one_row", stored) else shape
            if is_kernel(stored):  # (channels, 1, taps), as those of torch.nn.Conv1d
                taps = _taps(spec, stored)
                shape = (shape[0] // taps, 1, taps)
            named = list(zip(parts, arrays, strict=True))
            heads = heads_of(spec, parts[0]) if len(parts) > 1 and names.has("joined", stored) else 1
            make = lambda named=named, shape=shape, heads=heads: _rows(names, named, heads).reshape(shape)
            yield StoredTensor(stored, shape, make)


def _taps(spec: ModelSpec, kernel: str) -> int:
    """Tokens of the short convolution with this kernel."""
    mixer: Any = spec.layers[int(kernel.split(".")[2])].mixer
    return getattr(mixer, "mamba", mixer).conv_kernel


def _stacks(names: TensorNames, weights: Mapping[str, np.ndarray]) -> Iterator[StoredTensor]:
    """One tensor per stack, and per stack of biases."""
    for stored, parts in names.stored(weights).items():
        stem, _, kind = stored.rpartition(".")
        experts = len(weights[f"{parts[0].rpartition('.')[0]}.weight"])
        arrays = [weights[part].reshape(experts, -1, *weights[part].shape[2:]) for part in parts]
        transposed = names.has("transposed", stored) or names.has("transposed_or_not", stored)
        rows, columns = (sum(array.shape[1] for array in arrays),), arrays[0].shape[2:]
        shape = (experts, *columns, *rows) if transposed else (experts, *rows, *columns)
        is_alternating = names.has("alternating", stored)
        make = lambda arrays=arrays, form=(is_alternating, transposed): _stack(arrays, *form)
        short = stem if kind == "weight" else f"{stem}_{kind}"
        yield StoredTensor(short if stack_of(short)[0] == stored else stored, shape, make)


def _stack(arrays: list[np.ndarray], alternating: bool, transposed: bool) -> np.ndarray:
    """Joins the rows of stacks: those of each follow one another, or alternate. If `transposed`, inputs are rows."""
    if alternating:
        rows = np.stack(arrays, axis=2).reshape(len(arrays[0]), -1, *arrays[0].shape[2:])
    else:
        rows = np.concatenate(arrays, axis=1)
    return np.ascontiguousarray(rows.swapaxes(1, 2) if transposed else rows)


def _rows(names: TensorNames, parts: list[tuple[str, np.ndarray]], heads: int) -> np.ndarray:
    """Concatenates the rows of the parts, head by head. Stored norms do not include the 1 that the family adds."""
    arrays = [widened(array) - np.float32(1) if names.has("plus_one", name) else array for name, array in parts]
    return arrays[0] if len(arrays) == 1 else joined_rows(arrays, heads)


def _kv_b(heads: int, k_b: np.ndarray, v_b: np.ndarray) -> np.ndarray:
    """For each head: the rows of its keys, (nope, rank), then those of its values."""
    rank = v_b.shape[1]
    keys, values = k_b.reshape(heads, rank, -1).swapaxes(1, 2), v_b.reshape(heads, -1, rank)
    return np.concatenate([keys, values], axis=1).reshape(-1, rank)
