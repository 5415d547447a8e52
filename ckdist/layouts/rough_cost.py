"""Rough seconds of a traced program: bytes over nominal bandwidth, operations over nominal rates.

Equal starts get equal figures and make equal choices. They are right within a factor of two, which suffices to divide
layers and to compare layouts. `ckdist plan` has the figures of real machines.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ckdist.mesh import Mesh
from ckdist.program.program import Instr, Program, Weight
from ckdist.weights.packed_type import WeightCost

# Operations per second of one thread in a product, by kernels and activation format (0 float32, 1 bfloat16, 2 int8).
OPERATIONS = {
    "avx2": (40e9, 40e9, 80e9),
    "avx2_vnni": (40e9, 40e9, 100e9),
    "avx512": (100e9, 100e9, 250e9),
    "avx512_vnni": (100e9, 100e9, 300e9),
    "avx512_bf16": (100e9, 200e9, 300e9),
    "amx": (100e9, 800e9, 1200e9),
}
THREAD_READ = 10e9  # bytes/s of weights that one thread reads from its own NUMA node
PRODUCTS = "linear", "linear_heads", "experts"
ATTENTION = "attend", "attend_latent"


class Work(NamedTuple):
    """The work of one thread that runs a part of a step alone."""

    read: float  # bytes of weights
    operations: dict[int, float]  # of products, by activation format; a multiply-add is two
    computed: float  # seconds of products and attention

    @property
    def seconds(self) -> float:
        """Reading and computing overlap."""
        return max(self.read / THREAD_READ, self.computed)


def work(
    instrs: Iterable[Instr], mesh: Mesh, weight: Callable[[str], WeightCost], isa: str, tokens: int, outputs: int = 1
) -> Work:
    """The work of this rank's shard in a step of `tokens` tokens of one prompt with `outputs` rows of logits.

    Args:
        weight: The cost of a matrix per element.
        isa: Level of instructions. An unknown one has the rates of AVX2.
    """
    rates, operations = OPERATIONS.get(isa, OPERATIONS["avx2"]), dict[int, float]()
    read = computed = 0.0
    for instr in instrs:
        if instr.op in ATTENTION:
            seen = min(tokens / 2, instr.attrs.get("window") or math.inf)
            computed += 2.0 * tokens * seen * attended_width(instr, mesh) / rates[0]
        if instr.op not in PRODUCTS:
            continue
        rows = tokens if instr.inputs[0].dims[0].name == "tokens" else outputs
        for matrix in matrices_of(instr):
            cost, size = weight(matrix.name), math.prod(dim.local(mesh) for dim in matrix.dims)
            used = used_part(instr, matrix)
            read += size * cost.element_bytes * experts_hit(used, rows)
            operations[cost.form] = operations.get(cost.form, 0.0) + 2.0 * rows * size * used
    computed += sum(count / rates[form] for form, count in operations.items())
    return Work(read, operations, computed)


def attended_width(instr: Instr, mesh: Mesh) -> int:
    """Elements of a token's queries and attention outputs on this rank."""
    return instr.inputs[0].dims[1].local(mesh) + instr.outputs[0].dims[1].local(mesh)


def matrices_of(instr: Instr) -> list[Weight]:
    """The weights of an instruction without its vectors."""
    return [w for w in instr.weights if w is not None and len(w.dims) > 1]


def used_part(instr: Instr, matrix: Weight) -> float:
    """The fraction of a stack of experts that one row uses; 1 for other matrices."""
    return instr.inputs[1].dims[-1].count / matrix.dims[0].count if len(matrix.dims) > 2 else 1.0


def active_elements(program: Program) -> float:
    """Elements of matrices that a token is multiplied with."""
    products = [instr for instr in program.instrs if instr.op in PRODUCTS]
    return sum(matrix.elements * used_part(instr, matrix) for instr in products for matrix in matrices_of(instr))


def experts_hit(used: float, rows: float) -> float:
    """1 - (1 - used) ** rows: the expected fraction of experts that some row uses. `used`: the part for one row."""
    return 1 - (1 - min(1.0, used)) ** rows
