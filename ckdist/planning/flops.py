"""What a step of a lowered program must read and compute at least: the numbers that bounds on its speed are made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ckdist import native
from ckdist.comm.protocol import World
from ckdist.planning.expert_placement import experts_hit
from ckdist.program.lowered import Lowered
from ckdist.program.step import MatrixIndex, Step


class Matrix(Protocol):
    """A rank's part of a matrix as it is packed."""

    @property
    def type(self) -> int:
        """The ggml number of its elements."""
        ...

    @property
    def rows(self) -> int:
        """Outputs."""
        ...

    @property
    def cols(self) -> int:
        """Inputs."""
        ...

    @property
    def bytes(self) -> int:
        """Of the packed weights."""
        ...


@dataclass
class FlopCounts:
    """Of one rank, or added up over all.

    `bytes`: packed weights that every step reads. `stacks`: those of experts, by the part of them that a token takes.
    `per_token` and `per_output`: operations (two for a multiplication and its addition) with weights, by activation
    format (0 float32, 1 bfloat16, 2 int8), for every token and for every row of logits.
    """

    bytes: int = 0
    stacks: dict[float, float] = field(default_factory=dict)
    per_token: dict[int, float] = field(default_factory=dict)
    per_output: dict[int, float] = field(default_factory=dict)

    def __add__(self, other: "FlopCounts") -> "FlopCounts":
        add = lambda a, b: {key: a.get(key, 0.0) + b.get(key, 0.0) for key in {**a, **b}}
        return FlopCounts(
            self.bytes + other.bytes,
            add(self.stacks, other.stacks),
            add(self.per_token, other.per_token),
            add(self.per_output, other.per_output),
        )

    def bytes_read(self, tokens: int) -> float:
        """Packed weights that a step with so many tokens reads, of experts that are chosen by chance."""
        return self.bytes + sum(size * experts_hit(part, tokens) for part, size in self.stacks.items())

    def operations(self, tokens: int, outputs: int) -> dict[int, float]:
        """By activation format, of a step with `tokens` tokens and `outputs` rows of logits."""
        return {
            key: tokens * self.per_token.get(key, 0.0) + outputs * self.per_output.get(key, 0.0)
            for key in {**self.per_token, **self.per_output}
        }


def flops_of(lowered: Lowered, matrices: Sequence[Matrix]) -> FlopCounts:
    """The work of this rank's products; `matrices[i]` is the loaded handle of `lowered.matrices[i]`."""
    work = FlopCounts()
    for step in lowered.steps:
        if step.kind not in ("linear", "experts", "linear_heads"):
            continue
        kind = work.per_token if step.rows == "tokens" else work.per_output
        for index in step.operands(MatrixIndex):
            matrix = matrices[index]
            number = native.lib.ckdist_activation_format(native.ffi.NULL, matrix.type)
            used = _used(step, index)
            kind[number] = kind.get(number, 0.0) + 2.0 * matrix.rows * matrix.cols * used
            if used < 1:
                work.stacks[used] = work.stacks.get(used, 0.0) + matrix.bytes
            else:
                work.bytes += matrix.bytes
    return work


def _used(step: Step, matrix: MatrixIndex) -> float:
    """The part of a stack that one token takes; all of other matrices."""
    for one in step.fields.get("sets", ())[:1]:
        low = [one[f"{part}_low"][of] for part in ("gate", "up", "down") for of in "ab"]
        if any(matrix in span.indices() for span in (one["gate"], one["up"], one["down"], *low)):
            return min(1.0, step.fields["routing"]["used"] / max(1, one["count"]))
    return 1.0


def total_flops(world: World, local: FlopCounts) -> FlopCounts:
    """The work of all ranks; a collective call."""
    counts = world.gather([local.bytes, local.stacks, local.per_token, local.per_output])
    return sum((FlopCounts(*fields) for fields in counts), FlopCounts())
