"""The slow truth: runs a program in numpy by the ops' references, all ranks of a mesh in lock step in one process.

One sequence with its cache, or one step of training; for tests and for reading, never for serving.
"""

from collections.abc import Callable

import numpy as np

from ckdist.layout import Dim, Mesh
from ckdist.program.ops import OPS
from ckdist.program.program import Program


class RankContext:
    """What the references ask about the rank they run on."""

    def __init__(self, mesh: Mesh, spec):
        self.mesh, self.spec = mesh, spec
        self.cache: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # layer -> K, V: (positions, kv_heads, head_dim)
        self.positions = self.output_tokens = np.zeros(0, np.int32)
        self.starts = np.zeros(1, np.int32)  # where the packed sequences begin, and where the last one ends

    def share(self, dim: Dim):
        return dim.share(self.mesh)

    def rows(self, axis: str | None, count: int) -> tuple[int, int]:
        """Which of `count` rows cut over `axis` are this rank's, [begin, end)."""
        return self.share(Dim("tokens", count, axis=axis))

    def adds_bias(self, in_dim: Dim) -> bool:
        """Whether this rank adds a linear's bias: all do where the result is whole, the first where it is partial."""
        return in_dim.axis is None or self.mesh.index(in_dim.axis) == 0

    def rope_tables(self, table: str):
        """Cos and sin of the step's positions: float32 (tokens, head_dim / 2) each."""
        rope = self.spec.rope_local if table == "local" else self.spec.rope
        angles = self.positions.astype(np.float32)[:, None] * rope.inverse_frequencies.astype(np.float32)
        return np.cos(angles) * np.float32(rope.magnitude), np.sin(angles) * np.float32(rope.magnitude)

    def extend_cache(self, layer: int, k: np.ndarray, v: np.ndarray):
        if layer in self.cache:
            k, v = np.concatenate([self.cache[layer][0], k]), np.concatenate([self.cache[layer][1], v])
        self.cache[layer] = k, v
        return k, v

    def sequences(self) -> list[slice]:
        """The tokens of each packed sequence."""
        return [slice(begin, end) for begin, end in zip(self.starts[:-1], self.starts[1:])]

    def slice(self, weight, array: np.ndarray) -> np.ndarray:
        """This rank's part of a whole weight."""
        for axis, dim in enumerate(weight.dims):
            begin, end = self.share(dim)
            array = array.take(range(begin * dim.width, end * dim.width), axis=axis)
        return array


class Interpreter:
    """`load(name)` gives a whole weight, (out, in) or (n,); the arithmetic is in `dtype`."""

    def __init__(self, program: Program, spec, mesh: Mesh, load: Callable[[str], np.ndarray], dtype=np.float32):
        size = int(np.prod(list(mesh.axes.values())))
        self.program = program
        self.contexts = [RankContext(Mesh(mesh.axes, rank), spec) for rank in range(size)]
        self.weights = [
            {w: c.slice(w, np.asarray(load(w.name), dtype)) for w in program.weights} for c in self.contexts
        ]
        self.length = 0

    def run(self, token_ids, outputs=None) -> np.ndarray:
        """Continues the sequence by `token_ids`; logits (outputs, vocab) of those tokens (default: all), from rank
        0.
        """
        ids = np.asarray(token_ids, np.int32)
        wanted = np.arange(len(ids)) if outputs is None else np.asarray(outputs)
        axis, inputs = self.program.inputs[0].dims[0].axis, []
        for context in self.contexts:
            begin, end = context.rows(axis, len(ids))
            context.positions = self.length + np.arange(len(ids))
            context.output_tokens = wanted[(wanted >= begin) & (wanted < end)] - begin
            inputs.append([ids[begin:end]])
        self.length += len(ids)
        return self.evaluate(inputs)[0][0]

    def run_packed(self, batches) -> list[list[np.ndarray]]:
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
            if op.collective:
                results = op.reference(self.contexts, operands, {**instr.attrs, "inputs": instr.inputs})
            else:
                attrs = {**instr.attrs, "weights": instr.weights, "inputs": instr.inputs}
                results = [
                    op.reference(c, x, [None if w is None else weights[w] for w in instr.weights], attrs)
                    for c, x, weights in zip(self.contexts, operands, self.weights)
                ]
            for v, arrays in zip(values, results):
                v.update(zip((o.name for o in instr.outputs), arrays, strict=True))
        return [[v[o.name] for o in self.program.outputs] for v in values]
