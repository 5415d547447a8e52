"""The indexer of a layer with heads, which chooses blocks of positions for each kv-head."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockIndexer:
    """One query head per kv-head scores all positions. The score of a block is its largest one.

    A token sees `top_k` blocks, of which the last `local` are those up to its own block.
    """

    head_dim: int
    block: int  # positions
    top_k: int
    local: int = 1
