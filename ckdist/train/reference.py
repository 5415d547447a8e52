"""A TrainingExecutable over the numpy interpreter: the definition of what training computes, and slow."""

from collections.abc import Callable, Sequence

import numpy as np

from ckdist.comm.communicator import Communicator
from ckdist.mesh import Mesh
from ckdist.models.spec import ModelSpec
from ckdist.program.autodiff import backward, needed
from ckdist.program.interpreter import Interpreter
from ckdist.program.program import Program, Weight
from ckdist.train.arena import Arena, shape_of
from ckdist.train.batch import PackedBatch


class ReferenceExecutable:
    """`program` ends in the loss and is one rank's, without collectives; `load(name)` gives a weight's first value."""

    def __init__(
        self,
        program: Program,
        spec: ModelSpec,
        wrt: Sequence[Weight],
        load: Callable[[str], np.ndarray],
        communicator: Communicator | None = None,
        recompute: bool = False,
    ) -> None:
        """`wrt`: what is trained; `recompute`: as `autodiff.backward`."""
        mesh = Mesh({"dp": 1})
        self.parameters = Arena({w.name: shape_of(w) for w in wrt})
        self.gradients = Arena(self.parameters.shapes)
        for name, view in self.parameters.items():
            view[:] = load(name)
        source = lambda name: self.parameters[name] if name in self.parameters else load(name)
        self._forward = Interpreter(program, spec, mesh, source)
        self._backward = Interpreter(backward(program, program.outputs[0], wrt, recompute), spec, mesh, source)
        self._communicator, self.balance, self.waited = communicator, 0.0, 0.0
        self._coefficient, self._balance = spec.balance_coefficient, None
        balances = [instr.outputs for instr in program.instrs if instr.op == "balance_loss"]
        if balances:
            of_balance = Program(program.inputs, balances[0], needed(program.instrs, balances[0]))
            self._balance = Interpreter(of_balance, spec, mesh, source)
        # the interpreter copied them: the optimizer writes to the arena
        for interpreter in filter(None, (self._forward, self._backward, self._balance)):
            for weight in interpreter.weights[0]:
                if weight.name in self.parameters:
                    interpreter.weights[0][weight] = self.parameters[weight.name]

    def forward(self, batch: PackedBatch, chunk: int, slot: int) -> None:
        """Nothing: the only chunk has the loss."""

    def forward_backward(self, batch: PackedBatch, reduce: bool, chunk: int = 0, slot: int = 0) -> float:
        """This rank's sum of losses; its gradients are added, and with `reduce` summed over all ranks."""
        del chunk, slot  # it has the whole model
        loss, *gradients = self._backward.run_packed([batch])[0]
        for view, gradient in zip(self.gradients.values(), gradients, strict=True):
            view[...] += gradient
        if reduce and self._communicator is not None:
            self._communicator.all_reduce(self.gradients.flat, out=self.gradients.flat)
        added = self._added(batch)
        self.balance = added / self._coefficient if added else 0.0
        return float(loss) - added

    def loss(self, batch: PackedBatch) -> float:
        """This rank's sum of losses."""
        return float(self._forward.run_packed([batch])[0][0]) - self._added(batch)

    def _added(self, batch: PackedBatch) -> float:
        """What the load-balancing loss adds to the program's."""
        return float(self._balance.run_packed([batch])[0][0]) if self._balance else 0.0

    def flush(self) -> None:
        """Nothing: it sends nothing."""

    def zero_grad(self) -> None:
        """Sets the gradients to zero."""
        self.gradients.flat[:] = 0
