"""Lowered programs: the executor's steps, with the places of their values and weights."""

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ckdist.layout import Range
from ckdist.program.cache import LayerCache
from ckdist.program.step import ABSENT, MatrixIndex, Step, VectorIndex

RANK_UNIT = 16  # LoRA ranks are padded to whole tiles; the next matrix reads them from the start of a cache line
ALIGNMENT = 16  # parameters begin at multiples of 16 floats: a cache line
SLOTS = 2  # partial values alternate between this many exchange buffers


class MatrixKey(NamedTuple):
    """A part of a weight. In a stack, rows and columns are those of each of its `matrices`.

    The matrices of adapters in slots are a stack by slot.
    """

    name: str
    rows: Range
    columns: Range
    matrices: Range | None = None  # None: all matrices of a stack


VectorKey: TypeAlias = tuple[str, Range]  # name, elements


@dataclass
class Buffer:
    """The place of a step's value: `struct ckdist_value`."""

    place: str  # a name of `enum ckdist_place`
    width: int  # elements of the value in a row; serving: from row to row; for activations: columns of the matrix
    offset: int = 0
    format: int = 0
    lead: int = 0  # columns before the value's own
    floats: int = 0  # for activations: columns that come from the source, the others are zero
    rows: int = 0  # upper bound on the number of rows; 0: the tokens of a step
    selected: bool = False  # rows are those whose logits are needed, not tokens
    sum: int = ABSENT  # buffer for the sums over hosts, with the rows of this host
    room: int = 0  # training: elements that a row has space for
    stride: int = 0  # bytes from row to row
    kept: bool = False  # training: in the memory that is kept for a batch between its two passes
    order: Any = None  # activations: the source's column of each column, int32

    @property
    def is_operand(self) -> bool:
        """True if rows are stored in the form that products read."""
        return self.place == "activations"

    @property
    def in_arena(self) -> bool:
        """True if the arena has its rows."""
        return self.place in ("arena", "activations") and not self.kept


@dataclass(frozen=True)
class Parameter:
    """The place of a weight in the arenas of weights and gradients of a training."""

    name: str
    offset: int  # floats
    rows: int  # 1 for a vector; for a stack the rows of all its matrices
    columns: int
    stored: bool = False  # frozen and multiplied in the type of its file: it has no place in the arenas
    matrices: int = 1

    @property
    def end(self) -> int:
        """The offset after its last float."""
        return self.offset + (0 if self.stored else self.rows * self.columns)


def layer_of(weight: str) -> int | None:
    """The layer number in a weight's name; None if it belongs to no layer."""
    found = re.search(r"layers\.(\d+)\.", weight)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class StepList:
    """The steps of one run."""

    steps: list[Step]
    cleared: frozenset[int] = frozenset()  # training: parameters whose gradients are zeroed first


@dataclass(frozen=True)
class Lowered:
    """A lowered program: lists of steps over one numbering of values and one arena.

    A program that serves has one list. A training has two for each chunk of layers, its forward and its backward pass.
    """

    lists: list[StepList]
    buffers: list[Buffer]
    arena_bytes: int

    # Serving. The weights are shards of this rank, or of any rank of the host if tokens are sharded.
    matrices: list[MatrixKey] = field(default_factory=list)
    vectors: list[VectorKey] = field(default_factory=list)
    exchange_floats: int = 0  # floats of an exchange slot: the maximum over all ranks
    caches: dict[int, LayerCache] = field(default_factory=dict)  # by layer
    layer_steps: int = 0  # steps up to the end of the first layer
    tokens_sharded: bool = False  # each rank has a range of a step's tokens
    host_rows: str = "none"  # a name of `enum ckdist_host_rows`: whether hosts share out a rank's rows
    prompts: bool = False  # rows are prompts' rows, if the level has other products for them
    experts: dict[int, int] = field(default_factory=dict)  # layer -> number of experts
    adapters: int = 0  # slots for adapters of sequences

    # Training. The chunk with the loss runs its forward pass in the backward pass too.
    parameters: list[Parameter] = field(default_factory=list)
    packs: list[tuple[bool, tuple[int, ...]]] = field(default_factory=list)  # (transposed, parameters side by side)
    kept_bytes: list[int] = field(default_factory=list)  # of each chunk: memory per batch for kept values
    trained_floats: int = 0  # floats at the start of the weight arena that have gradients

    @property
    def steps(self) -> list[Step]:
        """The steps of all lists."""
        return [step for steps in self.lists for step in steps.steps]

    @property
    def stored(self) -> list[str]:
        """Names of the parameters that are multiplied in the type of their file."""
        return [p.name for p in self.parameters if p.stored]

    @property
    def floats(self) -> int:
        """Floats in the arena of all parameters."""
        return -(-max(p.end for p in self.parameters) // ALIGNMENT) * ALIGNMENT

    def labels(self) -> list[tuple[str, int | None]]:
        """For each step (its kind and the names of its matrices, its layer).

        The layer is None before the first and after the last layer.
        """
        found: list[tuple[str, int | None]] = []
        layer: int | None = None
        for s in self.steps:
            weights = [self.matrices[i][0] for i in s.operands(MatrixIndex)]
            norms = [self.vectors[i][0] for i in s.operands(VectorIndex)]
            layers = [number for name in weights + norms if (number := layer_of(name)) is not None]
            layer = s.fields.get("layer", layers[-1] if layers else None if weights or norms else layer)
            parts = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in weights)
            found.append((" ".join([s.kind, *parts]), layer))
        return found

    def __str__(self) -> str:
        buffers = [f"   v{i} {_text(buffer)}" for i, buffer in enumerate(self.buffers)]
        return "\n".join([*(f"{i:4d} {step}" for i, step in enumerate(self.steps)), *buffers]) + "\n"


def _text(buffer: Buffer) -> str:
    """A buffer as text, without offsets that depend on the sizes of other buffers."""
    numbers = {name: getattr(buffer, name) for name in ("width", "format", "lead", "floats", "rows")}
    if not buffer.in_arena:
        numbers["offset"] = buffer.offset
    shown = [f"{name}={number}" for name, number in numbers.items() if number]
    more = [*(["selected"] if buffer.selected else []), *([f"sum=v{buffer.sum}"] if buffer.sum != ABSENT else [])]
    return " ".join([buffer.place, *shown, *more])
