"""From the hidden states of a prompt's tokens to one vector, or to all of them."""

import numpy as np

# Over all tokens, the last token's, the first token's; none: that of each token.
POOLINGS = ("mean", "last", "cls", "none")


class Pooling:
    """Takes the rows of a sequence as steps make them, each token's once and in their order."""

    def __init__(self, kind: str) -> None:
        """`kind`: one of POOLINGS."""
        self.kind = kind
        self._sum: np.ndarray | None = None  # float64 (hidden,)
        self._count = 0
        self._rows: list[np.ndarray] = []  # each float32 (tokens, hidden), where none are to be pooled

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
        elif self.kind == "none":
            self._rows.append(rows.copy())
        elif self.kind == "last" or self._sum is None:
            self._sum, self._count = rows[-1 if self.kind == "last" else 0].astype(np.float64), 1

    def vector(self) -> np.ndarray:
        """Float32 (hidden,), or (tokens, hidden) where none are pooled; of at least one row."""
        if self.kind == "none":
            return np.concatenate(self._rows)
        assert self._sum is not None, "a prompt has a token"
        return (self._sum / self._count).astype(np.float32)
