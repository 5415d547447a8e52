"""The indexer of a layer with heads, which chooses blocks of positions for each kv-head."""

from dataclasses import dataclass, replace

from ckdist.layout import Dim


@dataclass(frozen=True)
class BlockIndexer:
    """One query head per kv-head scores all positions. The score of a block is its largest one.

    A token sees `top_k` blocks. The `local` blocks up to its own are always among them.
    """

    head_dim: int
    block: int  # positions
    top_k: int
    local: int = 1

    def rows(self, keys: Dim) -> dict[str, Dim]:
        """The rows of the matrices that make queries and keys. `keys`: those of the layer's keys."""
        return {"index_q": replace(keys, width=self.head_dim), "index_k": Dim("index", 1, self.head_dim)}
