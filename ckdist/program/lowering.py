"""Lowering: the steps of a program, the numbers of its values, and their places in the arena."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ckdist.errors import LayoutError
from ckdist.mesh import Mesh
from ckdist.program.fusion import Graph
from ckdist.program.lowered import Buffer
from ckdist.program.ops import op_named
from ckdist.program.program import Instr, Program, Value
from ckdist.program.step import ABSENT, Step, ValueIndex

ROW_ALIGN = 64
STRIP_ROWS = 16  # of ActivationRow (native/kernels/linear.h)


class Lowering:
    """The state of one lowering: each op's `lower` looks up operands here and emits its steps here.

    Serving and training share the numbers of values and the layout of the arena. `lower.ServingLowering` adds shards of
    weights, exchanges and activations, `lower_training.TrainingLowering` parameters, gradients and kept values.

    Attributes:
        step_set: The rule of an op that emits its steps, as in `ops.op.lower`.
        at: Name of each value in memory -> its buffer.
        same: Name of an alias -> the value that it is read from.
        rows: Buffers that lie side by side in one row; most rows have one.
    """

    step_set: str

    def __init__(self, mesh: Mesh, max_tokens: int):
        self.mesh, self.max_tokens = mesh, max_tokens
        self.buffers: list[Buffer] = []
        self.rows: list[list[int]] = []

    def begin(self, program: Program) -> None:
        """Begins the steps of a program. The numbers of its values continue from those of earlier programs."""
        self.program, self.graph = program, Graph(program)
        self.steps: list[Step] = []
        self.at: dict[str, ValueIndex] = {}
        self.same: dict[str, Value] = {}

    def rule(self, instr: Instr) -> Callable[..., None]:
        """The function that emits the steps of an instruction. Raises LayoutError if there is none."""
        if (rule := op_named(instr.op).lower.get(self.step_set)) is None:
            raise LayoutError(f"cannot lower {instr.op} for {self.step_set}: {instr}")
        return rule

    def emit(self, kind: str, rows: str = "tokens", /, **fields: Any) -> None:
        """Appends a step."""
        self.steps.append(Step(kind, fields, rows))

    # Values

    def stands_for(self, value: Value, source: Value) -> None:
        """Makes `value` an alias of `source`: readers of `value` read the buffer of `source`."""
        self.same[value.name] = source

    def source(self, value: Value) -> Value:
        """Follows aliases from `value` to the value that is in memory."""
        while value.name in self.same:
            value = self.same[value.name]
        return value

    def place_of(self, value: Value | None) -> ValueIndex:
        """The buffer of a value; ABSENT for None. Raises LayoutError if it has none yet."""
        if value is None:
            return ValueIndex(ABSENT)
        found = self.at.get(self.source(value).name)
        if found is None:
            raise LayoutError(f"cannot lower %{value.name}: its reader needs it in memory")
        return found

    def add(self, buffer: Buffer, own_row: bool = True) -> ValueIndex:
        """Adds a buffer; returns its index. Without `own_row` the caller puts it in a row with others."""
        self.buffers.append(buffer)
        index = ValueIndex(len(self.buffers) - 1)
        if own_row:
            self.rows.append([index])
        return index

    def buffer(self, place: str, width: int, **more: Any) -> ValueIndex:
        """Adds a buffer in a row of its own; returns its index."""
        return self.add(Buffer(place, width, **more))

    # Memory

    def place(self, steps: list[Step]) -> int:
        """Assigns offsets in the arena to all values that are not kept; returns the bytes of the arena.

        A row lives from the first to the last step that uses one of its values. Time is counted in intervals between
        barriers. In a small batch, norm_quantize has no barrier of its own, so it shares an interval with the following
        linear. A buffer written in an interval must not overlap one read in it.
        """
        row_of, uses, time = self.row_of(), [], 0
        for step in steps:
            used = [int(b) for b in step.operands(ValueIndex)]
            used += [self.buffers[b].sum for b in used]
            uses += [(time, row_of[b]) for b in used if b != ABSENT and self.buffers[b].in_arena]
            time += step.kind != "norm_quantize"
        offsets, total = first_fit(uses, self.row_bytes)
        for row, begin in offsets.items():
            self.move(row, begin)
        return total

    def row_of(self) -> dict[int, int]:
        """Index of a buffer -> its row."""
        return {b: row for row, buffers in enumerate(self.rows) for b in buffers}

    def row_bytes(self, row: int) -> int:
        """Bytes of a row's buffers for a whole batch, rounded up to a multiple of ROW_ALIGN."""
        head = self.buffers[self.rows[row][0]]
        rows = head.rows or self.max_tokens
        if head.place == "activations":  # they may be in strips
            rows = -(-rows // STRIP_ROWS) * STRIP_ROWS
        return -(-head.stride * rows // ROW_ALIGN) * ROW_ALIGN

    def move(self, row: int, begin: int) -> None:
        """Puts a row at byte `begin`. Until then, offsets of its buffers count from the start of the row."""
        for b in self.rows[row]:
            self.buffers[b].offset += begin


def first_fit(uses: Iterable[tuple[int, int]], size: Callable[[int], int]) -> tuple[dict[int, int], int]:
    """Places the largest value first, each at the lowest offset that is free during its lifetime.

    Args:
        uses: (time, value) pairs, times ascending. A value lives from its first use to its last, both included.
        size: Bytes of a value.

    Returns:
        The offset of each value, and the bytes of the arena.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for time, value in uses:
        first.setdefault(value, time)
        last[value] = time
    sizes = {value: size(value) for value in first}
    order = sorted(first, key=lambda v: -sizes[v])
    firsts, lasts = (np.array([times[v] for v in order], np.int64) for times in (first, last))  # (values,)
    begins, ends = np.zeros((2, len(order)), np.int64)  # byte ranges of the values that are already placed
    for at, value in enumerate(order):
        overlapping = np.flatnonzero((firsts[:at] <= last[value]) & (lasts[:at] >= first[value]))
        offset, bytes_ = 0, sizes[value]
        for begin, end in sorted(zip(begins[overlapping].tolist(), ends[overlapping].tolist(), strict=True)):
            if offset + bytes_ > begin:
                offset = max(offset, end)
        begins[at], ends[at] = offset, offset + bytes_
    return dict(zip(order, begins.tolist(), strict=True)), int(ends.max(initial=0))
