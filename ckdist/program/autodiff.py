"""Backward as a transform: a program that ends in a loss becomes one that also gives the loss's gradients by weights.

The instructions are walked in reverse, each op's vjp says what goes back through it, and gradients that meet are added.
Where a gradient comes out partial (a weight's, where the tokens are sharded; a value's, where a linear's outputs are),
an all_reduce follows as soon as the gradient is complete, so that it can overlap the rest. Nothing is computed that no
gradient in `wrt` needs.

A program of a stage that is not the last ends in what it sends: its backward pass begins with the gradient that comes
back from there. One that is not the first sends the gradient of what it received.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ckdist.errors import LayoutError
from ckdist.program.emitter import Emitter
from ckdist.program.ops import OPS
from ckdist.program.ops.stages import received_dims
from ckdist.program.program import Instr, Program, Value, Weight


def backward(program: Program, loss: Value, wrt: Sequence[Weight], recompute: bool = False) -> Program:
    """The program whose outputs are (loss, the gradient by each weight of `wrt`), each whole, and behind them what
    is sent back. In place of the loss stands what a stage sends.

    With `recompute` the backward pass of a block begins by running the block again from the program's boundary before
    it, so that of each block only its input is kept; the last block is not run again where its backward pass follows at
    once. Raises LayoutError where an op has no gradient, or none under the layout, and where the loss does not depend
    on a weight.
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
        # weights and values through which a gradient flows
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
        self.again: dict[Value, Value] = {}  # values of blocks that were run again

    def run(self) -> Program:
        """The program with its backward pass; see `backward`."""
        if self.loss in self.active:
            self.contributions.update((of, [gradient]) for of, gradient in self._first_gradients())
        for index in reversed(range(len(self.program.instrs))):
            instr = self.program.instrs[index]
            if index in self.blocks:
                self._run_again(*self.blocks[index])
            self._through(instr)
            for w in dict.fromkeys(instr.weights):
                if w in self.wrt and self.first_use[w] == index and (gradient := self._complete(w)) is not None:
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
        """Of the loss by itself; or of what is sent, each by the loss that others compute."""
        if self.send is None:
            return [(self.loss, self.g.emit("one", (), names=["d_loss"])[0])]
        sent = self.send.outputs
        attrs = {"axis": self.send.attrs["axis"], "stage": self.send.attrs["to"], **received_dims(*sent)}
        gradients = self.g.emit("recv", self.program.inputs[:1], names=["d_sent", "d_tally"][: len(sent)], **attrs)
        return list(zip(sent, gradients, strict=True))

    def _through(self, instr: Instr) -> None:
        """Turns the gradients of `instr`'s outputs into contributions to those of its operands."""
        grads = [self._complete(o) if o in self.active else None for o in instr.outputs]
        if all(grad is None for grad in grads):
            return
        vjp = OPS[instr.op].vjp
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
        """The sum of what was contributed, made whole; None where nothing was.

        Contributions that are partial alike are added first.
        """
        parts = self.contributions.pop(of, [])
        if len(alike := dict.fromkeys(p.partial for p in parts)) > 1:
            sums = (self._sum([p for p in parts if p.partial == axes]) for axes in alike)
            parts = [self.g.whole(total) for total in sums]
        return self.g.whole(self._sum(parts)) if parts else None

    def _sum(self, parts: Sequence[Value]) -> Value:
        """Of one or more values that are partial alike."""
        total, *more = parts
        for part in more:
            (total,) = self.g.emit("add", (total, part), names=[part.name.rpartition(".")[0]])
        return total

    # Recomputation

    def _blocks(self) -> dict[int, tuple[int, int]]:
        """Index of a block's last instruction -> the range of its instructions, for every block but one whose backward
        pass follows at once.
        """
        made_at = {o: index for index, instr in enumerate(self.program.instrs) for o in instr.outputs}
        ends = [made_at.get(b, -1) + 1 for b in self.program.boundaries]
        again = ends[:-1] if self.send is None else ends
        return {end - 1: (begin, end) for begin, end in pairwise(again) if begin < end}

    def _run_again(self, begin: int, end: int) -> None:
        """Emits the block's instructions anew; what no gradient reads is dropped at the end."""
        kept = set(self.program.boundaries)
        for instr in self.program.instrs[begin:end]:
            names = [o.name.rpartition(".")[0] for o in instr.outputs]
            outputs = self.g.emit(instr.op, tuple(map(self._now, instr.inputs)), instr.weights, names, **instr.attrs)
            self.again.update((old, new) for old, new in zip(instr.outputs, outputs, strict=True) if old not in kept)

    def _now(self, value: Value) -> Value:
        """What a value is called now: its copy where its block was run again."""
        return self.again.get(value, value)


def needed(instrs: Sequence[Instr], outputs: Sequence[Value]) -> tuple[Instr, ...]:
    """The instructions that `outputs` depend on, in order."""
    wanted, kept = set(outputs), []
    for instr in reversed(instrs):
        if not wanted.isdisjoint(instr.outputs):
            kept.append(instr)
            wanted.update(instr.inputs)
    return tuple(reversed(kept))
