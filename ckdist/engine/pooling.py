"""From the hidden states of a prompt's tokens to one vector."""

import numpy as np

POOLINGS = ("mean", "last", "cls")  # over all tokens, the last token's, the first token's


class Pooling:
    """Takes the rows of a sequence as steps make them, each token's once and in their order."""

    def __init__(self, kind: str) -> None:
        """`kind`: one of POOLINGS."""
        self.kind = kind
        self._sum: np.ndarray | None = None  # float64 (hidden,)
        self._count = 0

    @property
    def needs_all(self) -> bool:
        """Whether the rows of all tokens must come, not the last one's alone."""
        return self.kind != "last"

    def take(self, rows: np.ndarray) -> None:
        """Float32 (tokens, hidden), which are valid during the call alone."""
        if self.kind == "mean":
            total = rows.sum(axis=0, dtype=np.float64)
            self._sum = total if self._sum is None else self._sum + total
            self._count += len(rows)
        elif self.kind == "last" or self._sum is None:
            self._sum, self._count = rows[-1 if self.kind == "last" else 0].astype(np.float64), 1

    def vector(self) -> np.ndarray:
        """Float32 (hidden,), of at least one row."""
        assert self._sum is not None, "a prompt has a token"
        return (self._sum / self._count).astype(np.float32)
