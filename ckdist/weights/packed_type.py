"""In which type a matrix of a program is packed, an adapter's too."""

from ckdist.native import ffi, lib
from ckdist.weights.adapter import PackedMatrix, is_low_rank
from ckdist.weights.loader import ShardLoader


def packed_type(loader: ShardLoader, name: str) -> int:
    """The ggml number of the type that matrix `name` of a program is multiplied in."""
    return PackedMatrix.type if is_low_rank(name) else loader.type_of(name)


def weight_cost(loader: ShardLoader, name: str) -> tuple[float, int]:
    """Bytes per element of a matrix, and the activation format that it is multiplied with."""
    number = packed_type(loader, name)
    block = lib.ckdist_type_block_bytes(number) / lib.ckdist_type_block_elements(number)
    return block, lib.ckdist_activation_format(ffi.NULL, number)
