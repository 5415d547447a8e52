"""The slow truth: runs a program in numpy by the ops' references, all ranks of a mesh in lock step in one process.

One sequence with its cache, or one step of training; for tests and for reading, never for serving.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ckdist.mesh import Mesh
from ckdist.program.model_shape import ModelShape
from ckdist.program.ops import OPS
from ckdist.program.program import Program
from ckdist.program.rank_context import RankContext


class PackedSequences(Protocol):
    """One rank's part of a training step, as a `PackedBatch` has it."""

    @property
    def token_ids(self) -> np.ndarray:
        """Int32 (tokens,)."""
        ...

    @property
    def targets(self) -> np.ndarray:
        """Int32 (tokens,), -1 where there is none."""
        ...

    @property
    def starts(self) -> ArrayLike:
        """Where each sequence begins, and where the last one ends."""
        ...


class Interpreter:
    """`load(name)` gives a whole weight, (out, in) or (n,); the arithmetic is in `dtype`."""

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

    def run(self, token_ids: ArrayLike, outputs: ArrayLike | None = None) -> np.ndarray:
        """Continues the sequence by `token_ids`; logits (outputs, vocab) of those tokens (default: all), from rank
        0.
        """
        ids = np.asarray(token_ids, np.int32)
        wanted = np.arange(len(ids)) if outputs is None else np.asarray(outputs)
        axis, inputs = self.program.inputs[0].dims[0].axis, []
        for context in self.contexts:
            begin, end = context.rows(axis, len(ids))
            context.positions, context.first_token = self.length + np.arange(len(ids)), begin
            context.logits_indices = wanted[(wanted >= begin) & (wanted < end)] - begin
            inputs.append([ids[begin:end]])
        self.length += len(ids)
        return self.evaluate(inputs)[0][0]

    def run_packed(self, batches: Sequence[PackedSequences]) -> list[list[np.ndarray]]:
        """Runs a loss, or what `backward` made of it, on one PackedBatch per rank; every rank's outputs."""
        for context, batch in zip(self.contexts, batches, strict=True):
            context.starts = np.asarray(batch.starts)
            context.positions = np.arange(context.starts[-1]) - np.repeat(context.starts[:-1], np.diff(context.starts))
        return self.evaluate([[batch.token_ids, batch.targets] for batch in batches])

    def evaluate(self, inputs: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
        """Every rank's outputs from every rank's inputs, in the order of the program's."""
        values = [dict(zip((i.name for i in self.program.inputs), own, strict=True)) for own in inputs]
        for instr in self.program.instrs:
            op = OPS[instr.op]
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
