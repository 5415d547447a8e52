"""A TrainingExecutable over the numpy interpreter: the definition of what training computes, and slow."""

from collections.abc import Callable, Sequence

import numpy as np

from ckdist.comm.communicator import Communicator
from ckdist.mesh import Mesh
from ckdist.models.spec import ModelSpec
from ckdist.program.autodiff import backward
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
        self._communicator = communicator
        # the interpreter copied them: the optimizer writes to the arena
        for interpreter in (self._forward, self._backward):
            for weight in interpreter.weights[0]:
                if weight.name in self.parameters:
                    interpreter.weights[0][weight] = self.parameters[weight.name]

    def forward_backward(self, batch: PackedBatch, reduce: bool) -> float:
        """This rank's sum of losses; its gradients are added, and with `reduce` summed over all ranks."""
        loss, *gradients = self._backward.run_packed([batch])[0]
        for view, gradient in zip(self.gradients.values(), gradients, strict=True):
            view[...] += gradient
        if reduce and self._communicator is not None:
            self._communicator.all_reduce(self.gradients.flat, out=self.gradients.flat)
        return float(loss)

    def loss(self, batch: PackedBatch) -> float:
        """This rank's sum of losses."""
        return float(self._forward.run_packed([batch])[0][0])

    def zero_grad(self) -> None:
        """Sets the gradients to zero."""
        self.gradients.flat[:] = 0
