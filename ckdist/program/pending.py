"""Values that lowering has seen and no step has written yet: the step of their reader does."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass
class Residual:
    """x + factor * norm(sum of y), not yet written anywhere: it becomes a buffer in the prepare of its first reader."""

    x: int  # buffer or -1
    y: int  # buffer
    post_norm: int = -1
    eps: float = 0.0
    stored: int = -1
    factor: float = 1.0


@dataclass
class Normed:
    """factor * norm(a residual), which the prepare of its reader computes; `norm` -1: the residual as it is."""

    residual: Residual
    norm: int
    eps: float
    read_again: bool  # the residual, by an add
    factor: float = 1.0


@dataclass
class Head:
    """q, k or v of a layer on its way to attention.

    `squares`: where the sums of squares of all heads are, if these are normed together; -1: each head alone.
    """

    buffer: int
    norm: int = -1
    eps: float = 0.0
    table: str = ""
    squares: int = -1


Pending: TypeAlias = int | Residual | Normed | Head  # where a value is: its buffer, or what will write it
