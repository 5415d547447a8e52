"""In which type a matrix of a program is packed, an adapter's too, and what an element of it costs."""

from typing import NamedTuple

from ckdist import native
from ckdist.weights.adapter import PackedMatrix, is_low_rank
from ckdist.weights.dtypes import BY_NUMBER
from ckdist.weights.loader import ShardLoader


class WeightCost(NamedTuple):
    """Bytes per element of a matrix, the activation format that it is multiplied with, and its type's name."""

    element_bytes: float
    form: int
    kind: str = ""


def packed_type(loader: ShardLoader, name: str) -> int:
    """The ggml number of the type that matrix `name` of a program is multiplied in."""
    return PackedMatrix.type if is_low_rank(name) else loader.type_of(name)


def weight_cost(loader: ShardLoader, name: str) -> WeightCost:
    """Cost of matrix `name` of a program with the kernels of this CPU."""
    return cost_of_type(packed_type(loader, name), native.isa())


def cost_of_type(number: int, isa: str) -> WeightCost:
    """Cost of a matrix of a type, by its ggml number, with the kernels of level `isa`, which this CPU may lack."""
    kind = BY_NUMBER[number]
    return WeightCost(kind.block_bytes / kind.block_elements, activation_format(number, isa), kind.name)


def activation_format(number: int, isa: str) -> int:
    """The format in which kernels of level `isa` read the activations of a weight type, by its ggml number.

    Raises ConfigError if the level is not known.
    """
    return native.check(native.lib.ckdist_activation_format(isa.encode(), number))
