"""The types of the arguments and results of an op's functions."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckdist.layout import Dim
from ckdist.program.program import Value, Weight

if TYPE_CHECKING:  # the first two import the ops, and only references need the third
    from ckdist.program.emitter import Emitter
    from ckdist.program.fusion import Group
    from ckdist.program.rank_context import RankContext
else:
    Emitter = Group = RankContext = Any

Values: TypeAlias = tuple[Value, ...]
Weights: TypeAlias = tuple[Weight, ...]  # a linear's biases, which may be absent, are not read by `infer`
Attrs: TypeAlias = Mapping[str, Any]
Partial: TypeAlias = str | tuple[str, ...] | None  # an axis, several, or none
Inferred: TypeAlias = list[tuple[tuple[Dim, ...], Partial]]  # (dims, partial) of each output
Arrays: TypeAlias = list[np.ndarray]
Gradients: TypeAlias = list[Value | None]
