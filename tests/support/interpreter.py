"""Reference interpreter: runs a program in numpy, for all ranks of a mesh in lock step in one process.

It runs one sequence with its cache, or one training step. It is for tests and for reading, not for serving.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ckdist.mesh import Mesh
from ckdist.program.model_shape import ModelShape
from ckdist.program.ops import op_named
from ckdist.program.program import Program
from ckdist.program.rank_context import RankContext


class PackedSequences(Protocol):
    """One rank's part of a training step: the fields of a `PackedBatch`."""

    @property
    def token_ids(self) -> np.ndarray:
        """Int32 (tokens,)."""
        ...

    @property
    def targets(self) -> np.ndarray:
        """Int32 (tokens,), -1 for a token without a target."""
        ...

    @property
    def starts(self) -> ArrayLike:
        """The first token of each sequence, and the end of the last: int32 (sequences + 1,)."""
        ...


class Interpreter:
    """Runs `program` for all ranks of `mesh`.

    Args:
        load: Returns a whole weight by its name, (out, in) or (n,).
        dtype: The type of all arithmetic.
    """

    def __init__(
        self,
        program: Program,
        spec: ModelShape,
        mesh: Mesh,
        load: Callable[[str], ArrayLike],
        dtype: DTypeLike = np.float32,
    ):
        size = int(np.prod(list(mesh.axes.values())))
        self.program = program
        self.contexts = [RankContext(Mesh(mesh.axes, rank), spec) for rank in range(size)]
        self.weights = [
            {w: c.slice(w, np.asarray(load(w.name), dtype)) for w in program.weights} for c in self.contexts
        ]
        self.length = 0

    def run(self, token_ids: ArrayLike, outputs: ArrayLike | None = None, axes: np.ndarray | None = None) -> np.ndarray:
        """Appends `token_ids` to the sequence; returns the logits of rank 0, (outputs, vocab).

        `outputs` are the indices into `token_ids` whose logits are returned, by default all. `axes`: (tokens, 3),
        positions of three axes.
        """
        ids = np.asarray(token_ids, np.int32)
        wanted = np.arange(len(ids)) if outputs is None else np.asarray(outputs)
        axis, inputs = self.program.inputs[0].dims[0].axis, []
        for context in self.contexts:
            begin, end = context.rows(axis, len(ids))
            context.positions, context.first_token = self.length + np.arange(len(ids)), begin
            context.axes = axes
            context.logits_indices = wanted[(wanted >= begin) & (wanted < end)] - begin
            inputs.append([ids[begin:end]])
        self.length += len(ids)
        return self.evaluate(inputs)[0][0]

    def run_packed(self, batches: Sequence[PackedSequences]) -> list[list[np.ndarray]]:
        """Runs a loss program, or its result of `backward`, on one batch per rank. Returns the outputs of each rank."""
        for context, batch in zip(self.contexts, batches, strict=True):
            context.starts = np.asarray(batch.starts)
            context.positions = np.arange(context.starts[-1]) - np.repeat(context.starts[:-1], np.diff(context.starts))
        keyed = any(value.name == "dropout_keys" for value in self.program.inputs)
        more = lambda one: [*(getattr(one, "teacher", None) or ()), *([one.keys] if keyed else [])]
        return self.evaluate([[one.token_ids, one.targets, *more(one)] for one in batches])

    def evaluate(self, inputs: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
        """Runs the program. `inputs` and the result have one list per rank, in the program's order."""
        values = [dict(zip((i.name for i in self.program.inputs), own, strict=True)) for own in inputs]
        for instr in self.program.instrs:
            op = op_named(instr.op)
            operands = [[v[i.name] for i in instr.inputs] for v in values]
            attrs = {**instr.attrs, "weights": instr.weights, "inputs": instr.inputs}
            arrays = [[None if w is None else own[w] for w in instr.weights] for own in self.weights]
            if op.collective:
                results = op.reference(self.contexts, operands, {**attrs, "arrays": arrays})
            else:
                ranks = zip(self.contexts, operands, arrays, strict=True)
                results = [op.reference(context, own, weights, attrs) for context, own, weights in ranks]
            for v, arrays in zip(values, results, strict=True):
                v.update(zip((o.name for o in instr.outputs), arrays, strict=True))
        return [[v[o.name] for o in self.program.outputs] for v in values]
