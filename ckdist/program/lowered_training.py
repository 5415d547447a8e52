"""What training comes down to: the steps of each chunk of a model's layers, and what they work on."""

from dataclasses import dataclass

from ckdist.program.program import Program, Weight
from ckdist.program.step import Step

ALIGNMENT = 16  # floats between the beginnings of parameters: a cache line


@dataclass(frozen=True)
class Parameter:
    """A weight's place: `offset` floats into the arenas. A vector has one row, a stack those of all its `matrices`."""

    name: str
    offset: int
    rows: int
    columns: int
    stored: bool = False  # it is frozen, and multiplied as its file has it: it has no place
    matrices: int = 1

    @property
    def end(self) -> int:
        """One after its last float."""
        return self.offset + (0 if self.stored else self.rows * self.columns)


@dataclass
class PlacedValue:
    """`width` elements a row, with room for `room` of them in `stride` bytes; the first is at `offset` in the arena. A
    token has `rows` of them; 0: a batch has one.
    """

    width: int
    room: int
    operand: bool
    rows: int = 1
    stride: int = 0
    offset: int = 0
    kept: bool = False  # it lies in what is kept of a batch


@dataclass(frozen=True)
class ChunkPrograms:
    """Of a chunk of a model's layers, of `number` 0 where it is the whole: `forward` ends in the loss, or in what the
    next chunk receives; `gradients` is backward(forward, its output, wrt).
    """

    forward: Program
    gradients: Program
    wrt: tuple[Weight, ...]
    number: int = 0

    @property
    def has_loss(self) -> bool:
        """Whether it is the last chunk."""
        return not self.forward.outputs[0].dims


@dataclass(frozen=True)
class LoweredChunk:
    """`forward`: the steps without gradients. `backward`: those of the gradients; where there is a loss they begin with
    a forward pass of their own, else they read `kept_bytes` that `forward` left. `cleared`: parameters whose gradients
    begin with zeros.
    """

    forward: list[Step]
    backward: list[Step]
    cleared: frozenset[int]
    kept_bytes: int


@dataclass(frozen=True)
class LoweredTraining:
    """`packs[i]` is (transposed, parameters that lie side by side)."""

    chunks: list[LoweredChunk]
    values: list[PlacedValue]
    parameters: list[Parameter]
    packs: list[tuple[bool, tuple[int, ...]]]
    arena_bytes: int
    trained_floats: int  # of the arena's beginning: the parameters that have gradients

    @property
    def steps(self) -> list[Step]:
        """Of all chunks."""
        return [step for chunk in self.chunks for steps in (chunk.forward, chunk.backward) for step in steps]

    @property
    def stored(self) -> list[str]:
        """Names of the matrices that are multiplied as their file has them."""
        return [p.name for p in self.parameters if p.stored]

    @property
    def floats(self) -> int:
        """Of all parameters."""
        return -(-max(p.end for p in self.parameters) // ALIGNMENT) * ALIGNMENT
