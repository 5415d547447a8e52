"""Attention to compressed entries (DeepSeek-V4)."""

from dataclasses import dataclass

from ckdist.errors import ModelFileError
from ckdist.models.indexers import Indexer


@dataclass(frozen=True)
class CompressedAttention:
    """Heads that share one key per token, which is its value too. A token sees a window of keys, and entries.

    Attributes:
        rope_dim: The last elements of a head, which are rotated; those of the result are rotated back.
        q_rank: Low rank of queries.
        groups: Groups of heads. Each group has an output projection of its own to `o_rank` elements.
        window: Keys that a token sees.
        ratio: Tokens of a window that is compressed to an entry. 0: no entries.
        overlap: An entry is made of two windows, its own and the one before.
        indexer: Chooses the entries that a token sees. None: all.
    """

    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    groups: int
    o_rank: int
    window: int
    rope: str
    ratio: int = 0
    overlap: bool = False
    indexer: Indexer | None = None

    def check(self, where: str) -> None:
        """Raises ModelFileError if the numbers do not fit together."""
        widths = {"head_dim": self.head_dim} | ({"index_head_dim": self.indexer.head_dim} if self.indexer else {})
        for name, width in widths.items():
            unit = max(8, min(self.ratio, 16))
            if width % unit or width < self.rope_dim:
                raise ModelFileError(
                    f"{where}: {name} is {width}; it must be a multiple of {unit} and at least {self.rope_dim}"
                )
        if self.rope_dim % 2 or self.num_heads % self.groups:
            raise ModelFileError(
                f"{where}: {self.num_heads} heads must be {self.groups} equal groups, and the {self.rope_dim} rotated "
                "elements of a head pairs"
            )
        if self.ratio and 16 % self.ratio and self.ratio % 16:
            raise ModelFileError(f"{where}: compress_rates has {self.ratio}; it must divide 16 or be a multiple of it")
