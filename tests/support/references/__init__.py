"""The definitions of ops in numpy, one file for each file of `ckdist/program/ops`. The interpreter runs them.

`reference(context, inputs, weights, attrs)` returns a list of arrays of one rank. A collective has
`reference(contexts, inputs, attrs)`, with one list of arrays per rank; `attrs["arrays"]` has the weights.
"""

import importlib
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

from ckdist.program.ops import FILE_OF

Reference: TypeAlias = Callable[..., list[Any]]
REFERENCES: dict[str, Reference] = {}


def reference(name: str) -> Callable[[Reference], Reference]:
    """Registers the decorated function as the definition of op `name`."""

    def register(function: Reference) -> Reference:
        REFERENCES[name] = function
        return function

    return register


def reference_of(name: str) -> Reference:
    """The definition of op `name`. Imports its file."""
    importlib.import_module(f"{__name__}.{FILE_OF[name]}")
    return REFERENCES[name]


def total(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """0 + a + b + ..., in order. One or more arrays of one shape."""
    first, *more = arrays
    return sum(more, start=0 + first)
