"""Pools the hidden states of a prompt's tokens to one vector, or keeps all of them."""

import numpy as np

# Mean of all tokens, last token, first token; none: a vector per token.
POOLINGS = ("mean", "last", "cls", "none")


class Pooling:
    """Takes the rows of a sequence step by step, one row per token, in order.

    Args:
        kind: One of POOLINGS.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._sum: np.ndarray | None = None  # float64 (hidden,)
        self._count = 0
        self._rows: list[np.ndarray] = []  # each float32 (tokens, hidden); only if `kind` is none

    @property
    def needs_all(self) -> bool:
        """Whether the rows of all tokens are needed, not only the last one."""
        return self.kind != "last"

    def take(self, rows: np.ndarray) -> None:
        """Adds rows, float32 (tokens, hidden), which are valid during the call only."""
        if self.kind == "mean":
            total = rows.sum(axis=0, dtype=np.float64)
            self._sum = total if self._sum is None else self._sum + total
            self._count += len(rows)
        elif self.kind == "none":
            self._rows.append(rows.copy())
        elif self.kind == "last" or self._sum is None:
            self._sum, self._count = rows[-1 if self.kind == "last" else 0].astype(np.float64), 1

    def vector(self) -> np.ndarray:
        """The result of at least one row: float32 (hidden,), or (tokens, hidden) if `kind` is none."""
        if self.kind == "none":
            return np.concatenate(self._rows)
        assert self._sum is not None, "a prompt has a token"
        return (self._sum / self._count).astype(np.float32)
