"""A model's loss and gradients as the steps of one rank of a mesh: what is computed, before any weight is read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckdist.errors import ConfigError
from ckdist.layout import TRAINING
from ckdist.mesh import Mesh
from ckdist.models.blocks.moe import is_correction
from ckdist.models.decoder import loss as loss_of
from ckdist.models.spec import ModelSpec
from ckdist.program.autodiff import backward
from ckdist.program.lower_training import LoweredTraining, lower_training
from ckdist.program.program import Program, Weight
from ckdist.program.tracer import TrainingTracer, trace_loss
from ckdist.train.shards import Shards

OPERAND_BYTES = {"float32": 4, "bfloat16": 2}  # of an element that products read


@dataclass(frozen=True)
class LossProgram:
    """`program` gives the loss and its gradients by the weights of `trained`, for batches of up to `max_tokens`."""

    spec: ModelSpec
    max_tokens: int
    dtype: str
    program: Program
    lowered: LoweredTraining
    trained: tuple[Weight, ...]
    shards: Shards  # of all weights

    @property
    def operand_bytes(self) -> int:
        """Of an element that products read."""
        return OPERAND_BYTES[self.dtype]


def trace_model(spec: ModelSpec, mesh: Mesh, tracer: Callable[..., TrainingTracer] = TrainingTracer) -> Program:
    """The loss of a model on a mesh; the same text on every rank. LayoutError for what cannot be sharded so."""
    return trace_loss(loss_of, spec, TRAINING, mesh, tracer)


def trainable(program: Program) -> tuple[Weight, ...]:
    """The weights that a loss has gradients by, in the order of first use."""
    return tuple(w for w in program.weights if not is_correction(w.name))


def lower_model(
    spec: ModelSpec,
    max_tokens: int,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    trained: Sequence[str] | None = None,
    recompute: bool = False,
    tracer: Callable[..., TrainingTracer] = TrainingTracer,
    stored: frozenset[str] = frozenset(),
) -> LossProgram:
    """The steps of this rank of `mesh` (default: one rank).

    `dtype` is that of what products read: float32 is exact, bfloat16 adds up in float32; where the CPU cannot multiply
    bfloat16, its values are widened, and products are those of float32. `trained`: names, in the order in which their
    gradients lie (default: all, in the order of first use). `recompute`: keeps of each layer only its input, and
    computes it again. `tracer` writes the program. `stored`: frozen matrices that stay in their file's own type.
    Raises ConfigError.
    """
    if dtype not in OPERAND_BYTES:
        raise ConfigError(f"training cannot multiply in {dtype!r}; use {' or '.join(OPERAND_BYTES)}")
    place = mesh or Mesh.of_job(1, 0)
    program = trace_model(spec, place, tracer)
    weights = {w.name: w for w in program.weights}
    unknown = [name for name in trained or () if name not in weights]
    if unknown:
        raise ConfigError(f"{unknown[0]} cannot be trained: the model has no such weight")
    shards = Shards(program.weights, place)
    wrt = trainable(program) if trained is None else tuple(weights[name] for name in trained)
    both = backward(program, program.outputs[0], wrt, recompute)
    lowered = lower_training(program, both, wrt, place, max_tokens, OPERAND_BYTES[dtype], stored)
    return LossProgram(spec, max_tokens, dtype, both, lowered, wrt, shards)
