"""The lightning indexer of a layer, which chooses the positions that a token sees."""

from dataclasses import dataclass


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
