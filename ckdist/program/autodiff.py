"""Reverse-mode differentiation as a program transform: adds the gradients of a loss by its weights.

The instructions are walked in reverse. Each op's vjp emits the gradients of its operands, and gradients of the same
value are added. A gradient may be partial: a weight's if the tokens are sharded, a value's if the outputs of a linear
are. An all_reduce follows as soon as such a gradient is complete, so that it can overlap the rest. Instructions that no
gradient in `wrt` needs are dropped.

The program of a stage that is not the last ends in a send. Its backward pass begins by receiving the gradient of the
sent value. A stage that is not the first sends back the gradient of the value that it received.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ckdist.errors import LayoutError
from ckdist.program.emitter import Emitter
from ckdist.program.ops import op_named
from ckdist.program.ops.stage_transfer import received_dims
from ckdist.program.program import Instr, Program, Value, Weight


def backward(program: Program, loss: Value, wrt: Sequence[Weight], recompute: bool = False) -> Program:
    """Appends the backward pass to `program`.

    Args:
        program: The forward pass.
        loss: The loss, or the value that a stage sends if it is not the last.
        wrt: Weights whose gradients are wanted.
        recompute: Run each block again from its input before its backward pass, so that only the inputs of blocks are
            kept. The last block is not run again if its backward pass follows at once.

    Returns:
        A program with the outputs (loss, gradient by each weight of `wrt`, values sent back). None of them is partial.

    Raises:
        LayoutError: An op has no gradient, or none under this layout, or the loss does not depend on a weight.
    """
    return _Backward(program, loss, wrt, recompute).run()


class _Backward:
    def __init__(self, program: Program, loss: Value, wrt: Sequence[Weight], recompute: bool):
        makers = {o: i for i in program.instrs for o in i.outputs}
        self.send = makers[loss] if makers[loss].op == "send" else None
        if self.send is None and (loss.dims or loss.partial):
            raise LayoutError(f"backward needs a loss that is one whole number, but it is {loss}")
        self.program, self.loss, self.wrt = program, loss, tuple(wrt)
        values = [*program.inputs, *(o for i in program.instrs for o in i.outputs)]
        self.g = Emitter(values)
        received = (o for i in program.instrs if i.op == "recv" for o in i.outputs)
        # weights and values that need a gradient
        self.active: set[Value | Weight | None] = {*self.wrt, *received}
        for instr in program.instrs:
            if not self.active.isdisjoint((*instr.inputs, *instr.weights)):
                self.active.update(instr.outputs)
        self.contributions: dict[Value | Weight, list[Value]] = {}
        self.gradients: dict[Weight, Value] = {}
        self.first_use: dict[Weight | None, int] = {}
        for index, instr in enumerate(program.instrs):
            for w in instr.weights:
                self.first_use.setdefault(w, index)
        self.blocks = self._blocks() if recompute else {}
        self.again: dict[Value, Value] = {}  # value -> its copy in a block that was run again

    def run(self) -> Program:
        """Returns the program with its backward pass, as `backward` describes."""
        if self.loss in self.active:
            self.contributions.update((of, [gradient]) for of, gradient in self._first_gradients())
        wanted = set(self.wrt)
        for index in reversed(range(len(self.program.instrs))):
            instr = self.program.instrs[index]
            if index in self.blocks:
                self._run_again(*self.blocks[index])
            self._through(instr)
            for w in dict.fromkeys(instr.weights):
                if w in wanted and self.first_use[w] == index and (gradient := self._complete(w)) is not None:
                    self.gradients[w] = gradient
        for w in self.wrt:
            if w not in self.gradients:
                raise LayoutError(
                    f"%{self.loss.name} does not depend on {w}: leave it out of the weights that are trained"
                )
        sent = (o for instr in self.g.instrs if instr.op == "send" for o in instr.outputs)
        outputs = (self.loss, *(self.gradients[w] for w in self.wrt), *sent)
        instrs = needed((*self.program.instrs, *self.g.instrs), outputs)
        return Program(self.program.inputs, outputs, instrs)

    def _first_gradients(self) -> list[tuple[Value, Value]]:
        """Pairs of (value, gradient) that start the backward pass: the loss, or the values that a stage sends."""
        if self.send is None:
            return [(self.loss, self.g.emit("one", (), names=["d_loss"])[0])]
        sent = self.send.outputs
        attrs = {"axis": self.send.attrs["axis"], "stage": self.send.attrs["to"], **received_dims(*sent)}
        gradients = self.g.emit("recv", self.program.inputs[:1], names=["d_sent", "d_tally"][: len(sent)], **attrs)
        return list(zip(sent, gradients, strict=True))

    def _through(self, instr: Instr) -> None:
        """Applies the vjp of `instr`: adds contributions to the gradients of its operands."""
        grads = [self._complete(o) if o in self.active else None for o in instr.outputs]
        if all(grad is None for grad in grads):
            return
        vjp = op_named(instr.op).vjp
        if vjp is None:
            raise LayoutError(
                f"{instr.op} has no gradient: %{instr.outputs[0].name} = {instr.op}(...) cannot be trained through"
            )
        operands = (*instr.inputs, *instr.weights)
        seen = replace(instr, inputs=tuple(map(self._now, instr.inputs)), outputs=tuple(map(self._now, instr.outputs)))
        results = vjp(self.g, seen, grads, [o in self.active for o in operands])
        for operand, gradient in zip(operands, results, strict=True):
            if operand is not None and gradient is not None and operand in self.active:
                self.contributions.setdefault(operand, []).append(gradient)

    def _complete(self, of: Value | Weight) -> Value | None:
        """The complete gradient of a value, not partial; None if it has no contributions."""
        parts = self.contributions.pop(of, [])
        # Contributions that are partial over the same axes are added first: one all_reduce for each set of axes.
        axes_of_parts = dict.fromkeys(p.partial for p in parts)
        if len(axes_of_parts) > 1:
            sums = (self._sum([p for p in parts if p.partial == axes]) for axes in axes_of_parts)
            parts = [self.g.whole(total) for total in sums]
        return self.g.whole(self._sum(parts)) if parts else None

    def _sum(self, parts: Sequence[Value]) -> Value:
        """The sum of one or more values that are partial over the same axes."""
        total, *more = parts
        for part in more:
            (total,) = self.g.emit("add", (total, part), names=[part.name.rpartition(".")[0]])
        return total

    # Recomputation

    def _blocks(self) -> dict[int, tuple[int, int]]:
        """Maps the index of a block's last instruction to the range of its instructions.

        A last block whose backward pass follows at once is left out.
        """
        made_at = {o: index for index, instr in enumerate(self.program.instrs) for o in instr.outputs}
        ends = [made_at.get(b, -1) + 1 for b in self.program.boundaries]
        again = ends[:-1] if self.send is None else ends
        return {end - 1: (begin, end) for begin, end in pairwise(again) if begin < end}

    def _run_again(self, begin: int, end: int) -> None:
        """Emits the block's instructions again. `needed` drops those that no gradient reads."""
        kept = set(self.program.boundaries)
        for instr in self.program.instrs[begin:end]:
            names = [o.name.rpartition(".")[0] for o in instr.outputs]
            outputs = self.g.emit(instr.op, tuple(map(self._now, instr.inputs)), instr.weights, names, **instr.attrs)
            self.again.update((old, new) for old, new in zip(instr.outputs, outputs, strict=True) if old not in kept)

    def _now(self, value: Value) -> Value:
        """The copy of `value` if its block was run again, else `value`."""
        return self.again.get(value, value)


def needed(instrs: Sequence[Instr], outputs: Sequence[Value]) -> tuple[Instr, ...]:
    """The instructions that `outputs` depend on, in order."""
    wanted, kept = set(outputs), []
    for instr in reversed(instrs):
        if not wanted.isdisjoint(instr.outputs):
            kept.append(instr)
            wanted.update(instr.inputs)
    return tuple(reversed(kept))
