"""The indexers of layers, which choose the positions that a token sees."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckdist.layout import Dim

if TYPE_CHECKING:
    from ckdist.program.program import Value, Weight
    from ckdist.program.tracer import Tracer


@dataclass(frozen=True)
class Indexer:
    """DeepSeek-AI 2025, arXiv:2512.02556, section 2.1. Its queries come from the low rank of the layer's queries."""

    num_heads: int
    head_dim: int
    top_k: int  # positions that a token sees
    rope: str | None = "global"  # rotates the first elements of queries and keys, or those from `rope_first` on
    pool: int = 0  # tokens of a window whose keys are made one, and which is chosen as a whole; 0: no windows
    rope_first: int = 0
    norm_eps: float = 1e-6  # of the layer norm of keys


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

    def select(
        self,
        g: "Tracer",
        w: "Callable[..., Weight]",
        made: "Mapping[str, Value]",
        layer: int,
        rope: str | None,
        eps: float,
    ) -> dict[str, Any]:
        """The blocks that each token sees, as arguments of `attend`. `made` has the index queries and keys.

        `w` makes a weight of the attention by its name.
        """
        head = Dim("head_dim", self.head_dim)
        parts = [g.rms_norm(made[f"index_{n}"], w(f"index_{n}_norm.weight", head), eps) for n in "qk"]
        if rope is not None:
            parts = [g.rope(part, rope) for part in parts]
        sizes = {"block": self.block, "top_k": self.top_k, "local": self.local}
        (blocks,) = g.stateful("select_blocks", parts, (), ["blocks"], layer=layer, **sizes)
        return {"positions": blocks, "listed_block": self.block}


@dataclass(frozen=True)
class MeanIndexer:
    """Small heads score the mean of each block of keys. A token sees the blocks with the largest scores.

    It also sees the positions after the last complete block.
    """

    num_heads: int
    head_dim: int
    top_k: int  # positions of chosen blocks
    block: int

    def rows(self, keys: Dim) -> dict[str, Dim]:  # noqa: ARG002
        """The rows of the matrices that make queries and keys."""
        return {
            "index_q": Dim("index_heads", self.num_heads, self.head_dim), "index_k": Dim("index", 1, self.head_dim)
        }  # fmt: skip

    def select(
        self,
        g: "Tracer",
        w: "Callable[..., Weight]",
        made: "Mapping[str, Value]",
        layer: int,
        rope: str | None,
        eps: float,
    ) -> dict[str, Any]:
        """The positions that each token sees, as arguments of `attend`. `made` has the index queries and keys."""
        q = g.rms_norm(made["index_q"], w("index_q_norm.weight", Dim("head_dim", self.head_dim)), eps)
        norm = w("index_k_norm.weight", Dim("index_norm", self.head_dim))
        windows = {"ratio": self.block, "overlap": False, "rope": rope, "eps": eps, "means": True, "positions": True}
        (positions,) = g.stateful(
            "select_entries", (q, made["index_k"]), (norm,), ["positions"],
            layer=layer, index_top_k=self.top_k // self.block, **windows,
        )  # fmt: skip
        return {"positions": positions, "listed_window": self.block}
