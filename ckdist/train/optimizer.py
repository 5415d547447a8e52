"""Optimizers over an arena of parameters: clipping by the global norm, skipped steps, state over replicas.

One fused native pass updates parameters and state. From `zero_stage` 1 on, each replica holds the state of its own part
only: gradients are reduce-scattered, here or in the backward pass. Each part is updated, and the parts are gathered,
here or in the next forward pass.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckdist import native
from ckdist.mesh import Mesh
from ckdist.program.pool import ThreadPool
from ckdist.train.arena import NARROW, Arena
from ckdist.train.config import TrainConfig
from ckdist.train.moments import is_decayed, rounding, state_shapes
from ckdist.train.ownership import ELEMENTWISE, owned_ranges
from ckdist.train.ranks import TrainingRanks
from ckdist.train.shards import GATHER_TAG, Shards
from ckdist.train.whole_updates import WholeUpdates

lib = native.lib
STATES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "muon": ("exp_avg", "exp_avg_sq"),
    "adafactor": ("exp_avg_sq_row", "exp_avg_sq_col"),
    "adamw_8bit": ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"),
}


@dataclass(frozen=True)
class StepResult:
    """The norm of the mean gradient before clipping. If it was not finite or too large, the step was `skipped` and
    changed nothing.
    """

    grad_norm: float
    skipped: bool


class Optimizer:
    """Updates `parameters` from `gradients`, which have the same layout.

    `state[name]` is this rank's part, float32, of the arena's elements [begin, end).

    Args:
        gradients: Their gradients.
        ranks: The communicators. Default: this rank alone.
        pool: The threads. Default: one.
        shards: The places of the parameters. Default: they are whole, and no stages hold the same one.
        gradient_share: The sums of this rank's part of the gradients, if passes make them (ZeRO-2 and 3).
    """

    def __init__(
        self,
        config: TrainConfig,
        parameters: Arena,
        gradients: Arena,
        ranks: TrainingRanks | None = None,
        pool: ThreadPool | None = None,
        shards: Shards | None = None,
        gradient_share: np.ndarray | None = None,
    ) -> None:
        self.config, self.parameters, self.gradients = config, parameters, gradients
        self._gradient_share = gradient_share
        ranks = ranks or TrainingRanks(Mesh())
        # The ranks over which the state is sharded. Replicas share out the work of Muon, too.
        self._sharing = ranks.data if config.zero_stage or config.optim == "muon" else None
        self._summed_over = [c for c in (self._sharing, ranks.tensor, ranks.stages) if c is not None]
        self._tensor, self._ends = ranks.tensor, ranks.ends
        self._replicated = shards.replicated if shards and ranks.tensor is not None else []
        self._tied = shards.tied if shards and ranks.ends is not None else []
        ranks_sharing = 1 if self._sharing is None else self._sharing.size
        self.shares = owned_ranges(config.optim, parameters.shapes, ranks_sharing, shards)
        self.begin, self.end = self.shares[0 if self._sharing is None else self._sharing.rank]
        self._pool = pool or ThreadPool(1)
        self._native = native.new(lib.ckdist_optimizer_new, None, self._pool.handle)
        self.whole: WholeUpdates | None = None  # of an optimizer that needs whole parameters
        if config.optim not in ELEMENTWISE:
            own, tensor = (self.begin, self.end), ranks.tensor
            self.whole = WholeUpdates(config, parameters, own, shards if tensor else None, tensor, self._native)
        part = self.end - self.begin
        size = lambda name: Arena.size(self.state_shapes(name).values()) if self.whole else part
        self.state = {name: np.zeros(size(name), np.float32) for name in STATES[config.optim]}
        self.steps = 0  # steps that changed the parameters
        self._part_ends, self._decays = self._parts()
        self._rounding = self._places(shards if ranks.tensor is not None else None)
        is_last = self._ends is not None and self._ends.rank > 0
        others = {*(() if ranks.speaks else self._replicated), *(self._tied if is_last else ())}
        self._counted = self._stretches(sorted(others))  # other ranks of the replica leave these out

    @property
    def sharded(self) -> bool:
        """True if this rank holds only a part of the state."""
        return self._sharing is not None

    @property
    def gathers(self) -> bool:
        """True if passes gather the parameters of other ranks, so that this rank holds only its part (ZeRO-3)."""
        return self.sharded and self.config.zero_stage > 2

    def gathered(self, folder: Path) -> Arena | None:
        """All parameters on the first of the ranks that share them; None on others. A collective call of these.

        With ZeRO-3 they are in a file in `folder`, because memory may not hold them. Raises OSError.
        """
        if self._sharing is None or not self.gathers:
            return self.parameters
        if self._sharing.rank:
            self._sharing.send(self.parameters.flat[self.begin : self.end], 0, GATHER_TAG)
            return None
        whole = Arena.in_file(self.parameters.shapes, self.parameters.flat.dtype, folder)
        whole.flat[self.begin : self.end] = self.parameters.flat[self.begin : self.end]
        for rank, (begin, end) in enumerate(self.shares[1:], 1):
            self._sharing.recv(whole.flat[begin:end], rank, GATHER_TAG)
        return whole

    def state_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """The shapes of a state's arrays, all of them on this rank, or the elements [begin, end)."""
        return (
            self.parameters.shapes if self.whole is None else state_shapes(self.config.optim, name, self.whole.shapes)
        )

    def _parts(self) -> tuple[np.ndarray, np.ndarray]:
        """(end of each parameter's part on this rank, counted from `begin`; whether it is decayed)."""
        bounds = [*[begin for begin, _ in self.parameters.places.values()][1:], self.parameters.flat.size]
        decays = [is_decayed(name, shape) for name, shape in self.parameters.shapes.items()]
        return np.clip(np.array(bounds, np.int64), self.begin, self.end) - self.begin, np.array(decays, np.uint8)

    def _places(self, shards: Shards | None) -> list[dict[str, int]]:
        """The place of each part in its whole parameter, if parameters are bfloat16."""
        if self.parameters.flat.dtype != NARROW:
            return []
        whole = shards.whole_shapes if shards else self.parameters.shapes
        return [
            rounding(
                self.config.seed, name, whole[name], shards.spans(name) if shards else (), max(0, self.begin - begin)
            )
            for name, (begin, _) in self.parameters.places.items()
        ]

    def _stretches(self, left_out: Sequence[str]) -> list[tuple[int, int]]:
        """The ranges of this rank's part without the parameters `left_out`, counted from `begin`."""
        places = sorted(self.parameters.places[name] for name in left_out)
        edges = [0, *(edge - self.begin for place in places for edge in place)]
        edges = [min(max(edge, 0), self.end - self.begin) for edge in (*edges, self.end - self.begin)]
        return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]

    def step(self, learning_rate: float, tokens: float, most_norm: float = math.inf) -> StepResult:
        """Makes one update with the mean gradient over `tokens`, if its norm is at most `most_norm`. A collective call.

        Without sharding, `gradients` must be summed over replicas already.
        """
        self._sum_tied()
        gradient = self.gradients.flat[self.begin : self.end]
        if self._gradient_share is not None:
            gradient = self._gradient_share
        elif self._sharing is not None and self.config.zero_stage:
            gradient = self._sharing.reduce_scatter(
                self.gradients.flat, counts=[end - begin for begin, end in self.shares]
            )
        norm = math.sqrt(self._sum_squares(gradient)) / max(tokens, 1.0)
        if not math.isfinite(norm) or tokens <= 0 or norm > most_norm:
            return StepResult(norm, True)
        limit = self.config.max_grad_norm
        clip = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        self.steps += 1
        self._update(gradient, learning_rate, clip / tokens)
        if self._sharing is not None and not self.gathers:
            self._gather(0, self.parameters.flat.size)
        self._agree()
        return StepResult(norm, False)

    def _gather(self, begin: int, end: int) -> None:
        """Gathers the parameters' floats [begin, end) from their owners."""
        assert self._sharing is not None, "the state is sharded"
        inside = [tuple(min(max(edge, begin), end) for edge in share) for share in self.shares]
        first, last = inside[self._sharing.rank]
        flat = self.parameters.flat
        self._sharing.all_gather(flat[first:last], [high - low for low, high in inside], out=flat[begin:end])

    def _agree(self) -> None:
        """Copies replicated and tied parameters from the first rank of a replica to the others.

        They stay bit-identical even if CPUs differ, or if sums over replicas were made in another order.
        """
        for name in self._replicated if self.gathers else ():
            self._gather(*self.parameters.places[name])
        for communicator, names in ((self._tensor, self._replicated), (self._ends, self._tied)):
            if communicator is not None:
                self._exchange(communicator.broadcast, self.parameters, names)

    def _sum_tied(self) -> None:
        """Adds up the gradients that the first and the last stage have of tied parameters."""
        if self._ends is not None:
            self._exchange(self._ends.all_reduce, self.gradients, self._tied)

    @staticmethod
    def _exchange(call: Callable[[np.ndarray], np.ndarray], arena: Arena, names: Sequence[str]) -> None:
        """Applies a collective call to some arrays, concatenated, and stores the result in them."""
        if not names:
            return
        views = [arena[name].reshape(-1) for name in names]
        values = call(np.concatenate(views))
        for view, own in zip(views, np.split(values, np.cumsum([v.size for v in views])[:-1]), strict=True):
            view[:] = own

    def _sum_squares(self, gradient: np.ndarray) -> float:
        """The sum of squares of the whole gradient. Each element counts once. A collective call."""
        total = 0.0
        for begin, end in self._counted:
            total += native.call(lib.ckdist_optimizer_sum_squares, self._native, gradient[begin:end], end - begin)
        for communicator in self._summed_over:
            total = float(sum(communicator.all_gather(np.array([total])).tolist()))  # in rank order
        return total

    def _update(self, gradient: np.ndarray, learning_rate: float, scale: float) -> None:
        """Updates this rank's part of the parameters and the state. Gradients are multiplied by `scale`."""
        c = self.config
        own = self.parameters.flat[self.begin : self.end]
        update = {
            "ends": self._part_ends,
            "decays": self._decays,
            "parts": len(self._part_ends),
            "n": own.size,
            "step": self.steps,
            "gradient_scale": scale,
            "learning_rate": learning_rate,
            "weight_decay": c.weight_decay,
            "gradients": gradient,
        }
        update |= {"narrow": own, "rounding": self._rounding} if self._rounding else {"parameters": own}
        state = self.state.values()
        if c.optim == "adamw":
            numbers = [c.adam_beta1, c.adam_beta2, c.adam_epsilon]
            native.call(lib.ckdist_optimizer_adamw, self._native, update, *numbers, *state)
        elif self.whole is not None:
            self.whole.update(gradient, update, self.state)
        else:
            native.call(lib.ckdist_optimizer_sgd, self._native, update, c.momentum, *state)
