"""The random rounding of bfloat16 weights: the random number of an element depends on the seed, the step and its place
in the whole weight only. So a result depends neither on ranks and threads nor on a stop.
"""

import math
import zlib


def rounding(
    seed: int,
    name: str,
    shape: tuple[int, ...],
    spans: tuple[tuple[int, int], ...] = (),
    first: int = 0,
) -> dict[str, int]:
    """The `struct ckdist_rounding` of a part of a weight.

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
