"""AdamW and SGD over an arena of parameters: clipping by the global norm, steps that are skipped, and state sharded
over ranks.

One fused native pass updates parameters and state. With `zero_stage` 1 a rank has the state of its own part alone:
gradients are reduced to that part (Rajbhandari et al. 2020, arXiv:1910.02054), it is updated, and the parts are
gathered.
"""

import math
from dataclasses import dataclass

import numpy as np

from ckdist import native
from ckdist.comm.communicator import Communicator
from ckdist.layout import even_ranges
from ckdist.program.pool import ThreadPool
from ckdist.train.arena import ALIGNMENT, Arena
from ckdist.train.config import TrainConfig

ffi, lib = native.ffi, native.lib
STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
SAVE_TAG = 1000


@dataclass(frozen=True)
class StepResult:
    """The norm of the mean gradient before clipping; `skipped`: it was not finite, and nothing was changed."""

    grad_norm: float
    skipped: bool


def is_decayed(name: str, shape: tuple[int, ...]) -> bool:
    """Weight decay is for matrices: not for norms and biases."""
    return len(shape) > 1 and not name.endswith("bias")


class Optimizer:
    """Updates `parameters` from `gradients`, both laid out alike.

    `state[name]` is this rank's part, float32, of the arena's elements [begin, end).
    """

    def __init__(
        self,
        config: TrainConfig,
        parameters: Arena,
        gradients: Arena,
        communicator: Communicator | None = None,
        pool: ThreadPool | None = None,
    ) -> None:
        """`pool`: the threads; default: one."""
        self.config, self.parameters, self.gradients = config, parameters, gradients
        several = communicator if communicator is not None and communicator.size > 1 else None
        self._sharing = several if config.zero_stage else None  # the ranks that the state is sharded over
        size = parameters.flat.size
        self.shares = [(0, size)] if self._sharing is None else even_ranges(size, self._sharing.size, ALIGNMENT)
        self.begin, self.end = self.shares[0 if self._sharing is None else self._sharing.rank]
        self.state = {name: np.zeros(self.end - self.begin, np.float32) for name in STATES[config.optim]}
        self.steps = 0  # that changed the parameters
        self._ends, self._decays = self._parts()
        self._pool = pool or ThreadPool(1)
        out = ffi.new("struct ckdist_optimizer **")
        native.check(lib.ckdist_optimizer_new(ffi.NULL, self._pool.handle, out))
        self._native = ffi.gc(out[0], lib.ckdist_optimizer_free)

    @property
    def sharded(self) -> bool:
        """Whether this rank has a part of the state alone."""
        return self._sharing is not None

    def _parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Where this rank's decayed and other parts end, counted from `begin`."""
        ends, decays = [], []
        bounds = [*[begin for begin, _ in self.parameters.places.values()][1:], self.parameters.flat.size]
        for (name, shape), bound in zip(self.parameters.shapes.items(), bounds, strict=False):
            end = min(max(bound, self.begin), self.end) - self.begin
            decays.append(is_decayed(name, shape))
            ends.append(end)
        return np.array(ends, np.int64), np.array(decays, np.uint8)

    def step(self, learning_rate: float, tokens: float) -> StepResult:
        """One update with the mean gradient over `tokens`; a collective call.

        Without sharding `gradients` are summed over ranks already.
        """
        gradient = self.gradients.flat[self.begin : self.end]
        if self._sharing is not None:
            gradient = self._sharing.reduce_scatter(
                self.gradients.flat, counts=[end - begin for begin, end in self.shares]
            )
        norm = math.sqrt(self._sum_squares(gradient)) / max(tokens, 1.0)
        if not math.isfinite(norm) or tokens <= 0:
            return StepResult(norm, True)
        limit = self.config.max_grad_norm
        clip = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        self.steps += 1
        self._update(gradient, learning_rate, clip / tokens)
        if self._sharing is not None:
            flat = self.parameters.flat
            self._sharing.all_gather(
                flat[self.begin : self.end].copy(), counts=[end - begin for begin, end in self.shares], out=flat
            )
        return StepResult(norm, False)

    def _sum_squares(self, gradient: np.ndarray) -> float:
        """The sum of the squares of all ranks' parts; a collective call where the state is sharded."""
        out = ffi.new("double *")
        native.check(
            lib.ckdist_optimizer_sum_squares(self._native, native.pointer(gradient, "float *"), gradient.size, out)
        )
        if self._sharing is None:
            return out[0]
        return float(sum(self._sharing.all_gather(np.array([out[0]])).tolist()))  # in the order of ranks

    def _update(self, gradient: np.ndarray, learning_rate: float, scale: float) -> None:
        """Changes this rank's part of the parameters and the state; `scale`: what gradients are multiplied with."""
        c = self.config
        own = self.parameters.flat[self.begin : self.end]
        pointer = lambda array: native.pointer(array, "float *")
        update = ffi.new("struct ckdist_update *")
        update.ends, update.decays = native.pointer(self._ends, "int64_t *"), native.pointer(self._decays, "uint8_t *")
        update.parts, update.n, update.step = len(self._ends), own.size, self.steps
        update.gradient_scale, update.learning_rate, update.weight_decay = scale, learning_rate, c.weight_decay
        update.parameters, update.gradients = pointer(own), pointer(gradient)
        state = [pointer(array) for array in self.state.values()]
        if c.optim == "adamw":
            native.check(
                lib.ckdist_optimizer_adamw(self._native, update, c.adam_beta1, c.adam_beta2, c.adam_epsilon, *state)
            )
        else:
            native.check(lib.ckdist_optimizer_sgd(self._native, update, c.momentum, *state))

    def gather(self, name: str) -> Arena | None:
        """One state, whole, on rank 0; a collective call where it is sharded."""
        own = self.state[name]
        if self._sharing is None:
            return Arena(self.parameters.shapes, own)
        if self._sharing.rank:
            self._sharing.send(own, 0, SAVE_TAG)
            return None
        flat = np.empty(self.parameters.flat.size, np.float32)
        flat[self.begin : self.end] = own
        for rank, (begin, end) in enumerate(self.shares):
            if rank:
                flat[begin:end] = self._sharing.recv(np.empty(end - begin, np.float32), rank, SAVE_TAG)
        return Arena(self.parameters.shapes, flat)

    def restore(self, name: str, flat: np.ndarray) -> None:
        """Takes this rank's part of a saved state, laid out as the whole arena."""
        self.state[name][:] = flat[self.begin : self.end]


__all__ = ["Optimizer", "StepResult", "is_decayed"]
