"""A model's weights as tensors of its family's safetensors files.

They have their stored names. Stacks of experts become one tensor per expert unless the family stores stacks, and the
keys' and values' matrices of latent attention become one tensor.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ckdist.models.families.family import TensorNames, stack_of
from ckdist.models.moe_weights import is_expert
from ckdist.models.registry import family
from ckdist.models.spec import ModelSpec
from ckdist.train.arena import widened
from ckdist.weights.stored_weights import num_heads


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
            named = list(zip(parts, arrays, strict=True))
            yield StoredTensor(stored, shape, lambda named=named, shape=shape: _rows(names, named).reshape(shape))


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


def _rows(names: TensorNames, parts: list[tuple[str, np.ndarray]]) -> np.ndarray:
    """Concatenates the rows of the parts. Stored norms do not include the 1 that the family adds."""
    arrays = [widened(array) - np.float32(1) if names.has("plus_one", name) else array for name, array in parts]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _kv_b(heads: int, k_b: np.ndarray, v_b: np.ndarray) -> np.ndarray:
    """For each head: the rows of its keys, (nope, rank), then those of its values."""
    rank = v_b.shape[1]
    keys, values = k_b.reshape(heads, rank, -1).swapaxes(1, 2), v_b.reshape(heads, -1, rank)
    return np.concatenate([keys, values], axis=1).reshape(-1, rank)
