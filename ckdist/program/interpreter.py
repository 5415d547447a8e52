"""The slow truth: runs a program in numpy by the ops' references, all ranks of a mesh in lock step in one process.

One sequence with its cache; for tests and for reading, never for serving.
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

    def share(self, dim: Dim):
        return dim.share(self.mesh)

    def adds_bias(self, in_dim: Dim) -> bool:
        """Whether this rank adds a linear's bias: all do where the result is whole, the first where it is partial."""
        return in_dim.axis is None or self.mesh.index(in_dim.axis) == 0

    def rope_tables(self, table: str):
        """cos and sin of the step's positions: float32 (tokens, head_dim / 2) each."""
        rope = self.spec.rope_local if table == "local" else self.spec.rope
        angles = self.positions.astype(np.float32)[:, None] * rope.inverse_frequencies.astype(np.float32)
        return np.cos(angles) * np.float32(rope.magnitude), np.sin(angles) * np.float32(rope.magnitude)

    def extend_cache(self, layer: int, k: np.ndarray, v: np.ndarray):
        if layer in self.cache:
            k, v = np.concatenate([self.cache[layer][0], k]), np.concatenate([self.cache[layer][1], v])
        self.cache[layer] = k, v
        return k, v

    def slice(self, weight, array: np.ndarray) -> np.ndarray:
        """This rank's part of a whole weight."""
        for axis, dim in enumerate(weight.dims):
            begin, end = self.share(dim)
            array = array.take(range(begin * dim.width, end * dim.width), axis=axis)
        return array


class Interpreter:
    """`load(name)` gives a whole weight as float32, (out, in) or (n,)."""

    def __init__(self, program: Program, spec, mesh: Mesh, load: Callable[[str], np.ndarray]):
        size = int(np.prod(list(mesh.axes.values())))
        self.program = program
        self.contexts = [RankContext(Mesh(mesh.axes, rank), spec) for rank in range(size)]
        self.weights = [{w: c.slice(w, np.asarray(load(w.name), np.float32)) for w in program.weights} for c in self.contexts]
        self.length = 0

    def run(self, token_ids, outputs=None) -> np.ndarray:
        """Continues the sequence by `token_ids`; float32 logits (outputs, vocab) of those tokens (default: all), from rank 0."""
        ids = np.asarray(token_ids, np.int32)
        values = []
        for context in self.contexts:
            context.positions = self.length + np.arange(len(ids))
            context.output_tokens = np.arange(len(ids)) if outputs is None else np.asarray(outputs)
            values.append({self.program.inputs[0].name: ids})
        for instr in self.program.instrs:
            op = OPS[instr.op]
            inputs = [[v[i.name] for i in instr.inputs] for v in values]
            if op.collective:
                results = op.reference(self.contexts, inputs, instr.attrs)
            else:
                attrs = {**instr.attrs, "weights": instr.weights, "inputs": instr.inputs}
                results = [
                    op.reference(c, x, [None if w is None else weights[w] for w in instr.weights], attrs)
                    for c, x, weights in zip(self.contexts, inputs, self.weights)
                ]
            for v, arrays in zip(values, results):
                v.update(zip((o.name for o in instr.outputs), arrays))
        self.length += len(ids)
        return values[0][self.program.outputs[0].name]
