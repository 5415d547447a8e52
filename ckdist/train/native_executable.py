"""Computes loss and gradients natively: the arenas of parameters and gradients, and the native executable over them."""

import itertools
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckdist import native
from ckdist.errors import ConfigError
from ckdist.layout import Range
from ckdist.native import CData
from ckdist.program.execution_plan import ExecutionPlan, native_program
from ckdist.program.lowered import Lowered
from ckdist.program.pool import ThreadPool
from ckdist.program.step import ParameterIndex
from ckdist.train.arena import NARROW, WIDE, Arena, assign
from ckdist.train.batch import PackedBatch
from ckdist.train.loss_program import LossProgram
from ckdist.train.ranks import TrainingRanks
from ckdist.weights.handles import MatrixHandle

_KINDS = native.numbers("ckdist_training_step_kind", "ckdist_step_")
# Kinds of steps that read matrices unpacked.
READERS = ("lookup", "row_norms", "grouped_experts", "grouped_experts_grad", "latent_keys", "latent_keys_grad")


@dataclass(frozen=True)
class TrainingBytes:
    """The memory of an executable without parameters and gradients."""

    activations: int
    workspace: int
    packed: int  # frozen weights


def _pages(size: int) -> mmap.mmap:
    """`size` bytes of memory whose pages can be freed."""
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _once_read(lowered: Lowered) -> list[tuple[int, int]]:
    """Page ranges, as bytes [begin, end), of frozen matrices that only packing reads."""
    read = {int(p) for step in lowered.steps if step.kind in READERS for p in step.operands(ParameterIndex)}
    for _, side in lowered.packs:
        if any(lowered.parameters[q].offset < lowered.trained_floats for q in side):
            read |= set(side)
    frozen = [
        p
        for i, p in enumerate(lowered.parameters)
        if p.offset >= lowered.trained_floats and p.rows > 1 and not p.stored and i not in read
    ]
    pages = [
        (-(-4 * p.offset // mmap.PAGESIZE) * mmap.PAGESIZE, 4 * p.end // mmap.PAGESIZE * mmap.PAGESIZE) for p in frozen
    ]
    return [(begin, end) for begin, end in pages if begin < end]


def _teacher(batch: PackedBatch, choices: int) -> tuple[np.ndarray | None, np.ndarray | None, int]:
    """A teacher's ids, log-probabilities and number of choices, (None, None, 0) for a loss without one.

    Raises ConfigError if the batch has another number of choices.
    """
    if not choices:
        return None, None, 0
    shape = len(batch.token_ids), choices
    if batch.teacher is None or any(np.shape(array) != shape for array in batch.teacher):
        raise ConfigError(
            f"the loss follows a teacher: pass ids and log-probabilities of shape {shape} with each batch"
        )
    ids, logprobs = batch.teacher
    return np.ascontiguousarray(ids, np.int32), np.ascontiguousarray(logprobs, np.float32), choices


class NativeExecutable:
    """A model's loss and gradients on this rank's batches.

    `parameters` and `gradients` hold this rank's shards of the trained weights. Gradients are of the SUM of losses over
    all tokens with a target and all batches since `zero_grad`. `balance` is the load-balancing loss of the last
    `forward_backward`, times its targets, without the coefficient. Gradients and sums over ranks are float32, whatever
    type products read, and so are weights unless the program has them in bfloat16.

    Args:
        program: The steps of this rank.
        load: load(name) returns the initial value of a whole weight.
        pool: The threads. Default: one.
        ranks: The communicators. Default: this rank alone.
        stored: Frozen matrices that are held once, packed in the type of their file. Steps unpack them on the fly.
        owned: The floats of the parameters that each replica owns, if the optimizer's state is sharded.
    """

    def __init__(
        self,
        program: LossProgram,
        load: Callable[[str], np.ndarray],
        pool: ThreadPool | None = None,
        ranks: TrainingRanks | None = None,
        stored: Mapping[str, MatrixHandle] | None = None,
        owned: Sequence[Range] = (),
    ) -> None:
        self.program, self.ranks = program, ranks or TrainingRanks(program.shards.mesh)
        # From 1 on the optimizer sums gradients over replicas, from 2 on passes add these sums to `gradient_share`.
        self._zero, self._owned = program.zero_stage if self.ranks.data else 0, owned
        self.pool = pool or ThreadPool(1)
        self._stored = stored or {}
        lowered = program.lowered
        self.choices = max(step.fields.get("choices", 0) for step in lowered.steps)
        shapes, is_narrow = program.shards.shapes, program.weight_bytes == 2
        self._frozen, self._pages = [] if is_narrow else _once_read(lowered), None
        trained = {w.name: shapes[w.name] for w in program.trained}
        held = {place.name: shapes[place.name] for place in lowered.parameters if not place.stored}
        floats = lowered.trained_floats
        # Weights of one type are in one arena, the trained ones first.
        first, dtype = (trained, NARROW) if is_narrow else (held, WIDE)
        if self._frozen or self._zero > 2:
            self._pages = _pages(dtype.itemsize * Arena.size(first.values()))
        both = Arena(first, np.frombuffer(self._pages, dtype) if self._pages else None, dtype)
        self.parameters = Arena(trained, both.flat[:floats])
        self._others = Arena({name: held[name] for name in held if name not in trained}) if is_narrow else both
        for name in held:
            arena = self.parameters if name in trained else self._others
            assign(arena[name], program.shards.part(name, load(name)))
            self._free_others(name)
        # Gradients lie where peers read them in place, or where their pages are freed.
        shared = self.ranks.every
        self.gradient_share: np.ndarray | None = None  # ZeRO-2: sums over replicas of this rank's part
        if self._zero > 1 and self.ranks.data is not None:
            begin, end = owned[self.ranks.data.rank]
            self.gradient_share = np.zeros(end - begin, np.float32)
            self.gradients = Arena(trained, np.frombuffer(_pages(4 * floats), np.float32))
        else:
            self.gradients = Arena(trained, shared.allocate(floats) if shared else None)
            self.gradients.flat[:] = 0
        # Start of each chunk's kept activations, and the end of the last.
        sizes = [size * waiting for size, waiting in zip(lowered.kept_bytes, program.stage.waiting, strict=True)]
        self._kept = [0, *itertools.accumulate(sizes)]
        axes = (None if self._zero == 1 else self.ranks.data, self.ranks.tensor, self.ranks.stages, self.ranks.sequence)
        handles = [communicator.handle if communicator else None for communicator in axes]
        self._native = self._make_program()  # the native executable reads it while it lives
        self._handle = native.call(native.lib.ckdist_training_new, self._native, *handles, self.pool.handle)
        self._fresh = [False] * len(lowered.kept_bytes)  # by chunk: the next backward pass overwrites its gradients
        self.balance = self.waited = 0.0

    def _make_program(self) -> CData:
        """The `struct ckdist_program *`."""
        program, outgoing = self.program, self._outgoing()
        stored = {name: matrix.address for name, matrix in self._stored.items()}
        return native_program(
            [ExecutionPlan(program.lowered, stored=stored)],
            program.spec,
            program.max_tokens,
            program.positions,
            in_flight=len(outgoing),
            outgoing=outgoing,
            kept_bytes=self._kept[-1],
            trained_floats=program.lowered.trained_floats,
            bf16=program.dtype == "bfloat16",
            parameter_arena=self._others.flat,
            narrow_parameters=self.parameters.flat if program.weight_bytes == 2 else None,
            gradient_arena=self.gradients.flat,
            **self._shares(),
        )

    def _shares(self) -> dict[str, Any]:
        """The fields of the program for ZeRO-2 and 3."""
        if self.gradient_share is None:
            return {}
        ends = np.array([end for _, end in self._owned], np.int64)
        return {"share_ends": ends, "gradient_share": self.gradient_share}

    @property
    def gathers(self) -> bool:
        """True if each pass gathers the weights from all replicas (ZeRO-3)."""
        return self._zero > 2

    def _free_others(self, name: str) -> None:
        """ZeRO-3: frees the pages of a parameter that other ranks own."""
        if self._zero < 3 or self._pages is None or self.ranks.data is None or name not in self.parameters:
            return
        begin, end = self.parameters.places[name]
        size = self.parameters.flat.itemsize
        first, last = (min(max(edge, begin), end) for edge in self._owned[self.ranks.data.rank])
        for low, high in ((begin, first), (last, end)):
            start, stop = -(-size * low // mmap.PAGESIZE) * mmap.PAGESIZE, size * high // mmap.PAGESIZE * mmap.PAGESIZE
            if start < stop:
                self._pages.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def _outgoing(self) -> list[np.ndarray]:
        """Memory for rows that are sent to other stages, one array per message."""
        if self.ranks.every is None:
            return []
        return [self.ranks.every.allocate(self.program.message_floats) for _ in range(self.program.messages)]

    def forward(self, batch: PackedBatch, chunk: int, slot: int) -> None:
        """Runs the forward pass of a chunk. A slot keeps the values that its backward pass reads.

        Raises the errors of `forward_backward`.
        """
        self._run(batch, chunk, slot)

    def forward_backward(self, batch: PackedBatch, reduce: bool = True, chunk: int = 0, slot: int = 0) -> float:
        """Adds gradients to `gradients` and returns the sum of losses of this rank's replica.

        For a chunk without the loss it returns 0, and the gradients belong to the values that `forward` left in the
        slot. With `reduce`, the gradients are then summed over all replicas. Raises ConfigError for a batch that does
        not fit, CommError if a rank died or stalled.
        """
        return self._run(batch, chunk, slot, True, reduce)

    def loss(self, batch: PackedBatch) -> float:
        """Returns this rank's sum of losses without gradients; 0 if another stage computes the loss."""
        return sum(self._run(batch, chunk) for chunk in range(len(self._fresh)))

    def token_losses(self, batch: PackedBatch) -> np.ndarray:
        """Returns the loss of each token without its weight, float32 (tokens,); 0 without a target.

        The rank must have all layers.
        """
        losses = np.empty(len(batch.token_ids), np.float32)
        self._run(batch, 0, token_losses=losses)
        return losses

    def best_tokens(self, batch: PackedBatch) -> np.ndarray:
        """Returns the token with the largest logit after each token with a target, int32 (tokens,); -1 at others.

        The rank must have all layers.
        """
        best = np.empty(len(batch.token_ids), np.int32)
        self._run(batch, 0, best_tokens=best)
        return best

    def _run(
        self,
        batch: PackedBatch,
        chunk: int,
        slot: int = 0,
        backward: bool = False,
        reduce: bool = False,
        token_losses: np.ndarray | None = None,
        best_tokens: np.ndarray | None = None,
    ) -> float:
        """Runs one pass and returns its sum of losses."""
        if self.ranks.sequence is not None:
            from ckdist.train.data.divided_batch import own_part

            batch = own_part(batch, self.ranks.sequence.size, self.ranks.sequence.rank)
        ids, targets, starts = (
            np.ascontiguousarray(a, np.int32) for a in (batch.token_ids, batch.targets, batch.starts)
        )
        if len(ids) != len(targets):
            raise ConfigError(
                f"a batch has {len(ids)} tokens and {len(targets)} targets; pass one target per token, -1 for none"
            )
        if len(starts) < 2:
            raise ConfigError(
                f"a batch has {len(starts)} starts; pass where each sequence begins, and where the last ends"
            )
        weights = None if batch.weights is None else np.ascontiguousarray(batch.weights, np.float32)
        if weights is not None and len(weights) != len(ids):
            raise ConfigError(f"a batch has {len(ids)} tokens and {len(weights)} weights; pass one weight per token")
        if self._handle is None:
            raise ConfigError("this executable is closed")
        given = [ids, targets, starts, len(ids), len(starts) - 1, weights, token_losses, *_teacher(batch, self.choices)]
        given += [best_tokens, None if batch.keys is None else np.ascontiguousarray(batch.keys, np.uint32)]
        kept = self._kept[chunk] + slot * self.program.lowered.kept_bytes[chunk]
        clear = backward and self._fresh[chunk]
        one_pass = [2 * chunk + backward, clear or (backward and self._zero > 1), reduce, kept]
        losses = np.empty(2)  # (the sum of losses, the loss of load balancing)
        native.call(native.lib.ckdist_training_run, self._handle, [given], [one_pass], losses)
        if self._pages is not None:
            for begin, end in self._frozen:  # they are packed now: free their pages
                self._pages.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        self._frozen = []
        self._fresh[chunk] = self._fresh[chunk] and not backward
        loss, self.balance = losses.tolist()
        if self.program.stage.count > 1:
            seconds = self.times()
            self.waited = seconds["recv_rows"] + seconds["send_rows"]
        return loss

    def flush(self) -> None:
        """Waits until other stages have received all that was sent. Raises CommError if a rank died or stalled."""
        native.check(native.lib.ckdist_training_flush(self._handle))

    def trace(self, handle: CData) -> None:
        """Makes every thread record its steps in a native trace, which must outlive this object."""
        native.check(native.lib.ckdist_training_trace(self._handle, handle))

    def zero_grad(self) -> None:
        """Makes the next `forward_backward` overwrite the gradients. Until then they keep their values."""
        self._fresh = [True] * len(self._fresh)
        if self.gradient_share is not None:
            self.gradient_share[:] = 0

    def times(self) -> dict[str, float]:
        """Seconds of the last run by kind of step. "pack" is the part of them for packing weights.

        "reduce_gradients" is the time that this rank waited for other ranks.
        """
        out = np.empty(_KINDS["kinds"] + 1)
        native.call(native.lib.ckdist_training_times, self._handle, out)
        return {"pack" if name == "kinds" else name: float(out[number]) for name, number in _KINDS.items()}

    @property
    def bytes(self) -> TrainingBytes:
        """The memory of this executable without parameters and gradients."""
        out = np.empty(3, np.int64)
        native.call(native.lib.ckdist_training_bytes, self._handle, out)
        return TrainingBytes(*out.tolist())

    def close(self) -> None:
        """Frees threads and buffers. Parameters and gradients stay."""
        if self._handle is not None:
            native.lib.ckdist_training_free(self._handle)
            self._handle = None
