"""A training program, lowered: the steps of each chunk of layers, with their values and parameters."""

from dataclasses import dataclass

from ckdist.program.program import Program, Weight
from ckdist.program.step import Step

ALIGNMENT = 16  # parameters begin at multiples of 16 floats: a cache line


@dataclass(frozen=True)
class Parameter:
    """The place of a weight in the arenas of weights and gradients."""

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


@dataclass
class PlacedValue:
    """The place of a value."""

    width: int  # elements in a row
    room: int  # elements that a row has space for
    operand: bool  # stored in the form that products read
    rows: int = 1  # rows per token; 0: one row per batch
    stride: int = 0  # bytes from row to row
    offset: int = 0  # bytes from the start of the arena, or of the kept memory
    kept: bool = False  # in the memory that is kept for a batch between its two passes


@dataclass(frozen=True)
class ChunkPrograms:
    """The programs of one chunk of a model's layers."""

    forward: Program  # ends in the loss, or in a send to the next chunk
    gradients: Program  # backward(forward, its output, wrt)
    wrt: tuple[Weight, ...]
    number: int = 0  # 0 also if one chunk has all layers

    @property
    def has_loss(self) -> bool:
        """Whether the forward pass ends in the loss: this is the last chunk."""
        return not self.forward.outputs[0].dims


@dataclass(frozen=True)
class LoweredChunk:
    """The steps of one chunk."""

    forward: list[Step]
    backward: list[Step]  # the chunk with the loss runs its forward pass in here; others read values that forward kept
    cleared: frozenset[int]  # parameters whose gradients are zeroed first
    kept_bytes: int  # memory per batch for kept values


@dataclass(frozen=True)
class LoweredTraining:
    """The chunks of a rank, with the values and parameters of all of them."""

    chunks: list[LoweredChunk]
    values: list[PlacedValue]
    parameters: list[Parameter]
    packs: list[tuple[bool, tuple[int, ...]]]  # (transposed, parameters that are packed side by side)
    arena_bytes: int
    trained_floats: int  # floats at the start of the weight arena that have gradients

    @property
    def steps(self) -> list[Step]:
        """The steps of all chunks."""
        return [step for chunk in self.chunks for steps in (chunk.forward, chunk.backward) for step in steps]

    @property
    def stored(self) -> list[str]:
        """Names of the matrices that are multiplied in the type of their file."""
        return [p.name for p in self.parameters if p.stored]

    @property
    def floats(self) -> int:
        """Floats in the arena of all parameters."""
        return -(-max(p.end for p in self.parameters) // ALIGNMENT) * ALIGNMENT
