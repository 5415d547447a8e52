"""Lowers a model's loss and gradients to the steps of one rank of a mesh. No weight is read."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ckdist.errors import ConfigError
from ckdist.layout import TRAINING
from ckdist.mesh import Mesh
from ckdist.models.moe_weights import is_correction
from ckdist.models.spec import ModelSpec
from ckdist.models.training_loss import loss as loss_of
from ckdist.program.autodiff import backward
from ckdist.program.lower_training import ChunkPrograms, lower_training
from ckdist.program.lowered import Lowered
from ckdist.program.program import Program, Weight
from ckdist.program.step import ABSENT
from ckdist.program.training_tracer import TrainingTracer, trace_loss
from ckdist.train.shards import Shards
from ckdist.train.stage import TrainingStage

OPERAND_BYTES = {"float32": 4, "bfloat16": 2}  # per element


@dataclass(frozen=True)
class LossProgram:
    """The loss of this rank's `stage` and its gradients by `trained`, for batches of up to `max_tokens` tokens."""

    spec: ModelSpec
    max_tokens: int
    dtype: str
    stage: TrainingStage
    lowered: Lowered
    trained: tuple[Weight, ...]
    trained_shards: Shards  # of `trained`, and the trained weights of other stages
    shards: Shards  # of all weights
    weights_dtype: str = "float32"  # of the trained weights
    zero_stage: int = 0  # as of TrainConfig

    @property
    def positions(self) -> int:
        """Most tokens of a sequence, over all ranks that divide it."""
        return self.max_tokens * self.shards.mesh.axes.get("sp", 1)

    @property
    def operand_bytes(self) -> int:
        """Bytes of an element that products read."""
        return OPERAND_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of the trained weights."""
        return OPERAND_BYTES[self.weights_dtype]

    @property
    def messages(self) -> int:
        """Upper bound on messages to other stages under way."""
        return 0 if self.stage.count == 1 else sum(self.stage.waiting) + 2

    @property
    def message_floats(self) -> int:
        """Floats of a message: the rows of one rank of a stage, and the tally of experts after them."""
        tallies = [step.fields["tally"] for step in self.lowered.steps if step.kind == "send_rows"]
        tally = max((self.lowered.buffers[v].width for v in tallies if v != ABSENT), default=0)
        return -(-self.max_tokens // self.shards.mesh.size("tp")) * self.spec.hidden_size + tally


def trace_model(spec: ModelSpec, mesh: Mesh, tracer: Callable[..., TrainingTracer] = TrainingTracer) -> Program:
    """Traces the loss of a model on a mesh, the same on every rank. Raises LayoutError if it cannot be sharded."""
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
    stage: TrainingStage | None = None,
    zero_stage: int = 0,
    weights_dtype: str = "float32",
) -> LossProgram:
    """Returns the steps of this rank.

    Args:
        spec: The model.
        max_tokens: Most tokens of a batch.
        dtype: Type of the operands of products. float32 is exact; bfloat16 accumulates in float32. A CPU without
            bfloat16 products widens the values and multiplies in float32.
        mesh: Default: one rank.
        trained: Names in the order of their gradients. Default: all, in the order of first use.
        recompute: Keep only the input of each layer, and compute it again.
        tracer: Writes the program.
        stored: Frozen matrices that stay in their file's own type.
        stage: This rank's layers. Default: all.
        zero_stage: As of TrainConfig. From 3 on, steps gather trained weights shortly before their use.
        weights_dtype: Type of the trained weights in memory.

    Raises:
        ConfigError: A name is unknown, or the model cannot be trained so.
    """
    if dtype not in OPERAND_BYTES:
        raise ConfigError(f"training cannot multiply in {dtype!r}; use {' or '.join(OPERAND_BYTES)}")
    place, stage = mesh or Mesh.of_job(1, 0), stage or TrainingStage.whole(len(spec.layers))
    program = trace_model(spec, place, tracer)
    weights = {w.name: w for w in program.weights}
    unknown = [name for name in trained or () if name not in weights]
    if unknown:
        raise ConfigError(f"{unknown[0]} cannot be trained: the model has no such weight")
    wrt = trainable(program) if trained is None else tuple(weights[name] for name in trained)
    chunks = _chunks(program, stage, place, wrt, recompute)
    lowered = lower_training(chunks, place, max_tokens, OPERAND_BYTES[dtype], stored)
    if zero_stage > 2 and place.size("dp") * place.size("sp") > 1:
        from ckdist.program.gathered_parameters import with_gathers

        lowered = with_gathers(lowered)
    shards = Shards(tuple(dict.fromkeys(w for chunk in chunks for w in chunk.forward.weights)), place)
    by_stage = [_read_of(program, other, place, wrt) for other in stage.all_stages()]
    own = tuple(w for chunk in chunks for w in chunk.wrt)
    trained_shards = Shards(own, place, by_stage)
    return LossProgram(spec, max_tokens, dtype, stage, lowered, own, trained_shards, shards, weights_dtype, zero_stage)


def _read_of(program: Program, stage: TrainingStage, mesh: Mesh, wrt: Collection[Weight]) -> tuple[Weight, ...]:
    """The weights of `wrt` that a stage has, in the order of its parameters."""
    reads = (set(chunk.program(program, mesh).weights) for chunk in stage.chunks)
    return tuple(w for read in reads for w in wrt if w in read)


def _chunks(
    program: Program, stage: TrainingStage, mesh: Mesh, wrt: Collection[Weight], recompute: bool
) -> list[ChunkPrograms]:
    """The programs of a stage's chunks. Raises ConfigError if a chunk has no trained weight."""
    found = []
    for chunk in stage.chunks:
        forward = chunk.program(program, mesh)
        read = set(forward.weights)
        own = tuple(w for w in wrt if w in read)
        if not own:
            begin, end = chunk.layers
            raise ConfigError(f"layers {begin} to {end - 1} have no weights that are trained: use fewer stages")
        gradients = backward(forward, forward.outputs[0], own, recompute)
        found.append(ChunkPrograms(forward, gradients, own, chunk.number))
    return found
