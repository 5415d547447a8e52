"""The calls of a NativeExecutable over the numpy interpreter: the slow definition of training's results."""

from collections.abc import Callable, Sequence

import numpy as np

from ckdist.comm.communicator import Communicator
from ckdist.mesh import Mesh
from ckdist.models.spec import ModelSpec
from ckdist.program.autodiff import backward, needed
from ckdist.program.program import Program, Weight
from ckdist.train.arena import Arena, shape_of
from ckdist.train.batch import PackedBatch
from tests.support.interpreter import Interpreter


class ReferenceExecutable:
    """Runs a whole program on one rank.

    Args:
        program: Ends in the loss and has no collectives.
        load: load(name) returns a weight's initial value.
        communicator: The replicas, over which gradients are summed.
        recompute: Passed to `autodiff.backward`.
    """

    def __init__(
        self,
        program: Program,
        spec: ModelSpec,
        wrt: Sequence[Weight],
        load: Callable[[str], np.ndarray],
        communicator: Communicator | None = None,
        recompute: bool = False,
    ) -> None:
        mesh = Mesh({"dp": 1})
        self.parameters = Arena({w.name: shape_of(w) for w in wrt})
        self.gradients = Arena(self.parameters.shapes)
        for name, view in self.parameters.items():
            view[:] = load(name)
        source = lambda name: self.parameters[name] if name in self.parameters else load(name)
        self._forward = Interpreter(program, spec, mesh, source)
        self._backward = Interpreter(backward(program, program.outputs[0], wrt, recompute), spec, mesh, source)
        self._communicator, self.balance, self.waited, self.gradient_share = communicator, 0.0, 0.0, None
        self._coefficient, self._balance = spec.balance_coefficient, None
        balances = [instr.outputs for instr in program.instrs if instr.op == "balance_loss"]
        if balances:
            balance = Program(program.inputs, balances[0], needed(program.instrs, balances[0]))
            self._balance = Interpreter(balance, spec, mesh, source)
        # Interpreters copy weights. The optimizer writes to the arena, so they must read the arena's arrays.
        for interpreter in filter(None, (self._forward, self._backward, self._balance)):
            for weight in interpreter.weights[0]:
                if weight.name in self.parameters:
                    interpreter.weights[0][weight] = self.parameters[weight.name]

    def forward(self, batch: PackedBatch, chunk: int, slot: int) -> None:
        """Does nothing: the only chunk has the loss."""

    def forward_backward(self, batch: PackedBatch, reduce: bool, chunk: int = 0, slot: int = 0) -> float:
        """Adds gradients, with `reduce` summed over all ranks, and returns this rank's sum of losses."""
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
        """Returns this rank's sum of losses."""
        return float(self._forward.run_packed([batch])[0][0]) - self._added(batch)

    def _added(self, batch: PackedBatch) -> float:
        """The load-balancing loss that the program's loss includes."""
        return float(self._balance.run_packed([batch])[0][0]) if self._balance else 0.0

    def flush(self) -> None:
        """Does nothing: there are no other stages."""

    def zero_grad(self) -> None:
        """Sets the gradients to zero."""
        self.gradients.flat[:] = 0


def reference_executable(model, config, program, ranks, pool) -> ReferenceExecutable:
    """Makes the numpy executable, the definition of training's results. It holds whole weights."""
    data = None if config.zero_stage else ranks.data
    return ReferenceExecutable(
        model.program, model.spec, model.weights, model.load, data, config.activation_checkpointing
    )
