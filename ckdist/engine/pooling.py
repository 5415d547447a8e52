"""Pools the hidden states of a prompt's tokens to one vector, or keeps all of them."""

from typing import TYPE_CHECKING

import numpy as np

from ckdist.errors import RequestError

if TYPE_CHECKING:  # few models rank documents
    from ckdist.weights.stored_ranking import Ranking

# Mean of all tokens, last token, first token; none: a vector per token; rank: one number of the last token.
POOLINGS = ("mean", "last", "cls", "none", "rank")


class Pooling:
    """Takes the rows of a sequence step by step, one row per token, in order.

    Args:
        kind: One of POOLINGS.
        direction: For rank: float32 (hidden,), to multiply with the last token's hidden state.
    """

    def __init__(self, kind: str, direction: np.ndarray | None = None) -> None:
        self.kind, self._direction = kind, direction
        self._sum: np.ndarray | None = None  # float64 (hidden,)
        self._count = 0
        self._rows: list[np.ndarray] = []  # each float32 (tokens, hidden); only if `kind` is none

    @property
    def needs_all(self) -> bool:
        """True if the rows of all tokens are needed, not only the last one."""
        return self.kind not in ("last", "rank")

    def take(self, rows: np.ndarray) -> None:
        """Adds rows, float32 (tokens, hidden), which are valid during the call only."""
        if self.kind == "mean":
            total = rows.sum(axis=0, dtype=np.float64)
            self._sum = total if self._sum is None else self._sum + total
            self._count += len(rows)
        elif self.kind == "none":
            self._rows.append(rows.copy())
        elif not self.needs_all or self._sum is None:
            self._sum, self._count = rows[0 if self.needs_all else -1].astype(np.float64), 1

    def vector(self) -> np.ndarray:
        """The result of at least one row: float32 (hidden,), (tokens, hidden) if `kind` is none, (1,) if it is rank."""
        if self.kind == "none":
            return np.concatenate(self._rows)
        assert self._sum is not None, "a prompt has a token"
        vector = self._sum / self._count
        return (vector if self._direction is None else np.array([vector @ self._direction])).astype(np.float32)


def new_pooling(kind: str, ranking: "Ranking | None") -> Pooling:
    """Makes a pooling. `ranking`: the model's. Raises RequestError if the model has no such kind."""
    if kind not in POOLINGS:
        raise RequestError(f"pooling {kind[:40]!r} is not known: use one of {', '.join(POOLINGS)}", "pooling")
    if (kind == "rank") != (ranking is not None):
        raise RequestError(
            f"the model {'ranks' if ranking else 'does not rank'}, so pooling {kind} is wrong", "pooling"
        )
    return Pooling(kind, ranking.direction if ranking else None)
