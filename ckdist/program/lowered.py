"""What lowering makes of a program: the short list of steps that the native replay walks, and the buffers and
weights they work on.
"""

import re
from dataclasses import dataclass, field
from typing import TypeAlias

from ckdist.layout import Range

GATES = {"silu": 0, "gelu_tanh": 1}
ROPE_TABLES = {"global": 0, "local": 1}
NO_ROPE = -1
RANK_UNIT = 16  # low ranks are computed in whole tiles, and the next matrix reads them at the beginning of a cache line
SLOTS = 2  # partial values alternate between this many exchange buffers

MatrixKey: TypeAlias = tuple[str | tuple[str, ...], Range, Range]  # name or names, rows, columns
VectorKey: TypeAlias = tuple[str, Range]  # name, elements


@dataclass(frozen=True)
class Buffer:
    """Where a step's value lives.

    `kind` is arena, slot (what other ranks read), sums (what hosts add up, of all tokens, each rank's own rows at their
    place), logits or activations, or what is read in other ranks' slots: tokens (each token's row by the rank that has
    the token), columns (each rank's columns of this rank's tokens) or outputs (each output's row by the rank that has
    its token). `width` in floats from row to row (activations: columns of the matrix), `lead` columns before the
    value's own, `floats` (of activations) those that it takes from its source, `rows` how many there are at most.
    `taken`: its rows are outputs, not tokens.
    """

    kind: str
    width: int
    place: int = 0
    format: int = 0
    lead: int = 0
    floats: int = 0
    rows: int = 0
    taken: bool = False


@dataclass
class Step:
    """One native step; operands are indices into `Lowered.buffers`, `.matrices` and `.vectors`, -1 where absent.

    `counts`: how many consecutive ones an operand stands for, where it may be several. `outputs_only`: of the batch's
    outputs instead of its tokens, `own` of those whose tokens are this rank's.
    """

    op: str
    outputs_only: bool = False
    own: bool = False
    x: int = -1
    y: int = -1
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    matrices: list[int] = field(default_factory=list)
    vectors: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)

    def operands(self) -> list[int]:
        """Every buffer that the step reads or writes, -1 among them."""
        more = range(1, self.counts[0]) if self.counts else ()
        prepares, adds = self.op == "prepare", self.op == "linear" and any(self.ints[2:3])
        prepared = [first + k for first in self.outputs[1:] if first >= 0 for k in more] if prepares else []
        added = [self.inputs[0] + k for k in more] if adds else []
        return [self.x, self.y, *self.inputs, *self.outputs, *prepared, *added]


@dataclass(frozen=True)
class LayerAttention:
    """Attention of one layer on this rank: how many of its query heads share each of its kv-heads, and their widths."""

    heads_per_kv: tuple[int, ...]
    key_width: int
    value_width: int
    total_heads: int  # of all ranks
    total_kv_heads: int
    first_head: int
    # where the row of a token's rank has each kv-head, counted in heads; where heads are shared, some stand there twice
    key_places: tuple[int, ...] = ()


@dataclass
class Lowered:
    """`matrices[i]` is (weight name, rows, columns) and `vectors[i]` (weight name, elements), as [begin, end): this
    rank's, or where tokens are sharded any rank's. `exchange_floats`: what a slot holds at most, on any rank.
    `attention[layer]`: what a layer caches. `layer_steps`: the steps up to the end of the first layer. `tokens_cut`: every rank has its share of a step's tokens.

    Where a matrix's name is a tuple of names, they lie one below the other, each with rows of zeros up to a multiple of
    RANK_UNIT.
    """

    steps: list[Step]
    buffers: list[Buffer]
    matrices: list[MatrixKey]
    vectors: list[VectorKey]
    arena_bytes: int
    exchange_floats: int
    attention: dict[int, LayerAttention]
    layer_steps: int
    tokens_cut: bool

    def labels(self) -> list[tuple[str, int | None]]:
        """For each step its op with what it multiplies by, and its layer, None before the first and after the last."""
        found, layer = [], None
        for s in self.steps:
            weights = [name for i in s.matrices if i >= 0 for name in _names(self.matrices[i][0])]
            norms = [self.vectors[i][0] for i in s.vectors if i >= 0]
            layers = [int(m[1]) for name in weights + norms if (m := re.search(r"layers\.(\d+)\.", name))]
            layer = s.ints[0] if s.op == "attend" else layers[-1] if layers else None if weights or norms else layer
            parts = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in weights)
            found.append((" ".join([s.op, *parts]), layer))
        return found

    def __str__(self) -> str:
        lines = []
        for i, s in enumerate(self.steps):
            shown = {k: v for k, v in vars(s).items() if k != "op" and v not in ([], -1, False)}
            lines.append(f"{i:4d} {s.op:8s} " + " ".join(f"{k}={v}" for k, v in shown.items()))
        return "\n".join(lines) + "\n"


def _names(name: str | tuple[str, ...]) -> tuple[str, ...]:
    """The names of a matrix, one or several."""
    return name if isinstance(name, tuple) else (name,)
