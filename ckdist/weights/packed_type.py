"""The type that a matrix of a program is packed in, of a model or an adapter, and the cost of one element."""

from typing import NamedTuple

from ckdist import native
from ckdist.weights.dtypes import BY_NUMBER, F32
from ckdist.weights.loader import ShardLoader


class WeightCost(NamedTuple):
    """The cost of a matrix per element."""

    element_bytes: float
    form: int  # activation format that it is multiplied with
    kind: str = ""  # name of its type


def packed_type(loader: ShardLoader, name: str) -> int:
    """The ggml number of the type that matrix `name` of a program is packed in."""
    return F32.number if is_low_rank(name) else loader.type_of(name)


def is_low_rank(name: str) -> bool:
    """True if a matrix of a lowered program belongs to an adapter, not to the model."""
    return ".lora_" in name


def weight_cost(loader: ShardLoader, name: str) -> WeightCost:
    """The cost of matrix `name` of a program with the kernels of this CPU."""
    return cost_of_type(packed_type(loader, name), native.isa())


def cost_of_type(number: int, isa: str) -> WeightCost:
    """The cost of a matrix with the kernels of level `isa`, which this CPU may lack. `number` is its ggml type."""
    kind = BY_NUMBER[number]
    return WeightCost(kind.block_bytes / kind.block_elements, activation_format(number, isa), kind.name)


def activation_format(number: int, isa: str) -> int:
    """The format in which kernels of level `isa` read the activations of a weight type, by its ggml number.

    Raises ConfigError if the level is not known.
    """
    return native.check(native.lib.ckdist_activation_format(isa.encode(), number))
