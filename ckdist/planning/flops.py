"""Counts the bytes and operations that a step of a lowered program needs at least, for bounds on its speed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ckdist import native
from ckdist.comm.world_protocol import World
from ckdist.planning.expert_placement import experts_hit
from ckdist.program.lowered import Lowered
from ckdist.program.step import MatrixIndex, Step


class Matrix(Protocol):
    """A rank's packed shard of a matrix."""

    @property
    def type(self) -> int:
        """The ggml number of its elements."""
        ...

    @property
    def rows(self) -> int:
        """Number of outputs."""
        ...

    @property
    def cols(self) -> int:
        """Number of inputs."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of the packed weights."""
        ...


@dataclass
class FlopCounts:
    """The counts of one rank, or their sum over ranks.

    Operations are counted by activation format (0 float32, 1 bfloat16, 2 int8). A multiply-add is two operations.
    """

    bytes: int = 0  # packed weights that each step reads
    stacks: dict[float, float] = field(default_factory=dict)  # fraction of experts that a token uses -> their bytes
    per_token: dict[int, float] = field(default_factory=dict)  # operations with weights per token
    per_output: dict[int, float] = field(default_factory=dict)  # operations with weights per row of logits

    def __add__(self, other: "FlopCounts") -> "FlopCounts":
        add = lambda a, b: {key: a.get(key, 0.0) + b.get(key, 0.0) for key in {**a, **b}}
        return FlopCounts(
            self.bytes + other.bytes,
            add(self.stacks, other.stacks),
            add(self.per_token, other.per_token),
            add(self.per_output, other.per_output),
        )

    def bytes_read(self, tokens: int) -> float:
        """Bytes of packed weights that a step with `tokens` tokens reads, if experts are chosen at random."""
        return self.bytes + sum(size * experts_hit(part, tokens) for part, size in self.stacks.items())

    def operations(self, tokens: int, outputs: int) -> dict[int, float]:
        """Operations of a step by activation format. `outputs`: rows of logits."""
        return {
            key: tokens * self.per_token.get(key, 0.0) + outputs * self.per_output.get(key, 0.0)
            for key in {**self.per_token, **self.per_output}
        }


def flops_of(lowered: Lowered, matrices: Sequence[Matrix]) -> FlopCounts:
    """The counts of this rank's products. `matrices[i]` is the handle of `lowered.matrices[i]`."""
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
    """The fraction of a stack that one token uses; 1 for other matrices."""
    for one in step.fields.get("sets", ())[:1]:
        low = [one[f"{part}_low"][of] for part in ("gate", "up", "down") for of in "ab"]
        if any(matrix in span.indices() for span in (one["gate"], one["up"], one["down"], *low)):
            return min(1.0, step.fields["routing"]["used"] / max(1, one["count"]))
    return 1.0


def total_flops(world: World, local: FlopCounts) -> FlopCounts:
    """The sum of the counts of all ranks. A collective call."""
    counts = world.gather([local.bytes, local.stacks, local.per_token, local.per_output])
    return sum((FlopCounts(*fields) for fields in counts), FlopCounts())
