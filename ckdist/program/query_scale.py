"""The rule that scales queries by their position."""

from dataclasses import dataclass


@dataclass(frozen=True)
class QueryScale:
    """Queries at position p are multiplied by 1 + beta * log(1 + floor((p + from_one) / context)).

    So attention stays sharp beyond `context` positions, as in Llama 4 and Ministral 3.
    """

    beta: float
    context: int
    from_one: bool = False  # positions count from 1
