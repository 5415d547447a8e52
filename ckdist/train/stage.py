"""The layers that a rank trains: its stage, which has one or more chunks of layers.

Chunks are dealt round-robin: of S stages with V chunks each, stage s has the chunks s, s + S, ...
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from ckdist.errors import ConfigError
from ckdist.layout import Range
from ckdist.layouts.stage_plan import even_slices
from ckdist.mesh import Mesh
from ckdist.program.pipeline_stage import Stage
from ckdist.program.program import Instr, Program, Weight
from ckdist.train.arena import shape_of
from ckdist.train.one_f_one_b import most_waiting, passes

MAX_CHUNKS = 256  # of a model: each uses its own message tags


@dataclass(frozen=True)
class TrainingStage:
    """The `number`-th of `count` stages."""

    number: int
    count: int
    slices: tuple[Range, ...]  # layers of each of the model's chunks
    waiting: tuple[int, ...]  # by chunk of this stage: most batches between forward and backward pass

    @property
    def chunks(self) -> tuple[Stage, ...]:
        """This stage's chunks."""
        every = [Stage(number, len(self.slices), layers) for number, layers in enumerate(self.slices)]
        return tuple(every[self.number :: self.count])

    def all_stages(self) -> "list[TrainingStage]":
        """All stages in order, with this stage's `waiting`."""
        return [replace(self, number=number) for number in range(self.count)]

    @staticmethod
    def whole(layers: int) -> "TrainingStage":
        """The only stage of a model of `layers` layers."""
        return TrainingStage(0, 1, ((0, layers),), (0,))

    @staticmethod
    def of(mesh: Mesh, program: Program, trained: Collection[Weight], chunks: int, batches: int) -> "TrainingStage":
        """Returns this rank's stage of `chunks` chunks of layers, for steps of at most `batches` batches.

        Raises ConfigError if there are too few layers.
        """
        count, layers = mesh.size("pp"), len(program.boundaries) - 1
        if count == 1:
            if chunks > 1:
                raise ConfigError(
                    f"virtual_pipeline_parallel_size ({chunks}) divides the layers of stages: "
                    "set pipeline_parallel_size to 2 or more, or leave it out"
                )
            return TrainingStage.whole(layers)
        if count * chunks > min(layers, MAX_CHUNKS):
            raise ConfigError(
                f"pipeline_parallel_size ({count}) times virtual_pipeline_parallel_size ({chunks}) is "
                f"{count * chunks}, and must be at most {min(layers, MAX_CHUNKS)}: "
                f"each chunk has at least one of the {layers} layers"
            )
        slices = even_slices(layer_operations(program, trained), count * chunks)
        batches = batches if chunks == 1 else -(-batches // count) * count
        waiting = most_waiting(passes(mesh.index("pp"), count, chunks, batches), chunks)
        return TrainingStage(mesh.index("pp"), count, tuple(slices), tuple(waiting))

    def __str__(self) -> str:
        begin_end = (chunk.layers for chunk in self.chunks)
        layers = ", ".join(f"{begin} to {end - 1}" if end > begin + 1 else f"{begin}" for begin, end in begin_end)
        return f"stage {self.number} of {self.count} (layers {layers})"


def layer_operations(program: Program, trained: Collection[Weight]) -> list[float]:
    """Operations of each layer's matrix products per token, forward and backward. The last layer includes the head."""
    ends = {boundary: layer for layer, boundary in enumerate(program.boundaries)}
    costs, layer = [0.0] * (len(program.boundaries) - 1), 0
    for instr in program.instrs:
        costs[min(layer, len(costs) - 1)] += product_operations(instr, trained)
        layer = max([layer, *(ends[o] for o in instr.outputs if o in ends)])
    return costs


def product_operations(instr: Instr, trained: Collection[Weight]) -> float:
    """Operations of an instruction's matrix products per token, forward and backward.

    6 per element of a trained matrix (Kaplan et al. 2020, arXiv:2001.08361, section 2.1), 4 per element of a frozen
    one.
    """
    if instr.op in ("embed", "row_norms"):  # no products of tokens
        return 0.0
    matrices = [w for w in instr.weights if w is not None and len(w.dims) > 1]
    total = float(sum((6 if w in trained else 4) * math.prod(shape_of(w)) for w in matrices))
    if instr.op == "grouped_experts":  # a token uses only some of the stacked experts
        total *= instr.inputs[1].dims[-1].count / instr.weight(0).dims[0].count
    return total
