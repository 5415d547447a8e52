"""Loss and gradients, natively: the arenas of parameters and gradients, and the replay that reads and writes them."""

import itertools
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckdist import native
from ckdist.errors import ConfigError
from ckdist.models.spec import RopeSpec
from ckdist.native import CData
from ckdist.program.lowered_training import LoweredTraining, Parameter, PlacedValue
from ckdist.program.pool import ThreadPool
from ckdist.program.rotations import ROPE_TABLES
from ckdist.program.step import ParameterIndex, Step, native_steps
from ckdist.train.arena import Arena
from ckdist.train.batch import PackedBatch
from ckdist.train.loss_program import LossProgram
from ckdist.train.ranks import TrainingRanks
from ckdist.weights.handles import MatrixHandle

_KINDS = native.numbers("ckdist_training_step_kind", "ckdist_step_")
# Kinds of steps that read matrices as they lie.
READERS = ("lookup", "grouped_experts", "grouped_experts_grad", "latent_keys", "latent_keys_grad")


@dataclass(frozen=True)
class TrainingBytes:
    """What an executable holds beside parameters and gradients."""

    activations: int
    workspace: int
    packed: int  # frozen weights


def _once_read(lowered: LoweredTraining) -> list[tuple[int, int]]:
    """Whole pages, as bytes [begin, end), of the matrices that are not trained and that only packing reads."""
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


class NativeExecutable:
    """A TrainingExecutable: a model's loss and gradients on this rank's batches.

    `parameters` and `gradients` hold this rank's shards of what is trained. Master weights, gradients and sums over
    ranks are float32, whatever products read.
    """

    def __init__(
        self,
        program: LossProgram,
        load: Callable[[str], np.ndarray],
        pool: ThreadPool | None = None,
        ranks: TrainingRanks | None = None,
        stored: Mapping[str, MatrixHandle] | None = None,
        sharded: bool = False,
    ) -> None:
        """`load(name)`: a whole weight's first value. `pool`: the threads; default: one. `ranks`: default: this one.
        `stored`: frozen matrices that are held once, packed in their file's own type; steps unpack them as they go.
        `sharded`: the optimizer sums gradients over the replicas.
        """
        self.program, self.ranks = program, ranks or TrainingRanks(program.shards.mesh)
        self.pool = pool or ThreadPool(1)
        self._stored = stored or {}
        lowered = program.lowered
        self._frozen, self._pages = _once_read(lowered), None
        shapes = program.shards.shapes
        every = {place.name: shapes[place.name] for place in lowered.parameters if not place.stored}
        if self._frozen:
            self._pages = mmap.mmap(-1, 4 * lowered.floats, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._every = Arena(every, np.frombuffer(self._pages, np.float32) if self._pages else None)
        for name, view in self._every.items():
            view[:] = program.shards.part(name, load(name))
        # Gradients lie where peers read them in place.
        shared = self.ranks.every
        trained = {w.name: self._every.shapes[w.name] for w in program.trained}
        self.parameters = Arena(trained, self._every.flat[: lowered.trained_floats])
        self.gradients = Arena(trained, shared.allocate(lowered.trained_floats) if shared else None)
        self.gradients.flat[:] = 0
        # where what is kept of each chunk begins, and its end
        sizes = [c.kept_bytes * waiting for c, waiting in zip(lowered.chunks, program.stage.waiting, strict=True)]
        self._kept = [0, *itertools.accumulate(sizes)]
        self._keep: list[Any] = []
        out = native.ffi.new("struct ckdist_training **")
        axes = (None if sharded else self.ranks.data, self.ranks.tensor, self.ranks.stages)
        of_axes = [communicator.handle if communicator else native.ffi.NULL for communicator in axes]
        native.check(native.lib.ckdist_training_new(self._native(lowered), *of_axes, self.pool.handle, out))
        self._handle = out[0]
        self._fresh = [False] * len(lowered.chunks)  # chunks for whom what the gradients hold does not count
        self.balance = self.waited = 0.0

    def _array(self, values: Sequence[Any], dtype: str) -> CData:
        """A native array, kept alive."""
        array = native.ffi.new(dtype + "[]", values)
        self._keep.append(array)
        return array

    def _native(self, lowered: LoweredTraining) -> CData:
        """The struct ckdist_training_program."""
        spec = self.program.spec
        return native.ffi.new(
            "struct ckdist_training_program *",
            {
                "lists": self._array(self._lists(lowered), "struct ckdist_training_list"),
                "list_count": 2 * len(lowered.chunks),
                "values": self._array([self._value(v) for v in lowered.values], "struct ckdist_value"),
                "value_count": len(lowered.values),
                "parameters": self._array(
                    [self._parameter(p) for p in lowered.parameters], "struct ckdist_training_parameter"
                ),
                "parameter_count": len(lowered.parameters),
                "packs": self._array(
                    [
                        {"transposed": transposed, "count": len(of), "parameters": self._array(of, "int32_t")}
                        for transposed, of in lowered.packs
                    ],
                    "struct ckdist_training_pack",
                ),
                "pack_count": len(lowered.packs),
                "arena_bytes": lowered.arena_bytes,
                "kept_bytes": self._kept[-1],
                "max_tokens": self.program.max_tokens,
                "vocab": spec.vocab_size,
                "trained_floats": lowered.trained_floats,
                "bf16": self.program.dtype == "bfloat16",
                "ropes": [self._rope(spec.ropes.get(table)) for table in ROPE_TABLES],
                "parameter_arena": native.pointer(self._every.flat, "float *"),
                "gradient_arena": native.pointer(self.gradients.flat, "float *"),
                **self._outgoing(),
            },
        )

    def _lists(self, lowered: LoweredTraining) -> list[dict[str, Any]]:
        """The fields of a struct ckdist_training_list for each chunk's forward pass, and for its backward pass."""

        def fields(steps: list[Step], cleared: Sequence[int] = ()) -> dict[str, Any]:
            """Of one of both."""
            cleared_array = self._array(cleared, "int32_t")
            steps_array = native_steps(steps, self._keep)
            return {"steps": steps_array, "count": len(steps), "cleared": cleared_array, "cleared_count": len(cleared)}

        return [of for c in lowered.chunks for of in (fields(c.forward), fields(c.backward, sorted(c.cleared)))]

    def _outgoing(self) -> dict[str, Any]:
        """The fields of a struct ckdist_training_program that say where rows for other stages lie."""
        count = self.program.messages
        if self.ranks.every is None or count == 0:
            return {"outgoing": native.ffi.NULL, "outgoing_count": 0}
        places = [self.ranks.every.allocate(self.program.message_floats) for _ in range(count)]
        self._keep.append(places)
        addresses = self._array([native.pointer(place, "float *") for place in places], "float *")
        return {"outgoing": addresses, "outgoing_count": count}

    def _parameter(self, p: Parameter) -> dict[str, Any]:
        """The fields of a struct ckdist_training_parameter."""
        address = self._stored[p.name].address if p.stored else 0
        matrix = native.ffi.cast("void *", address)
        shape = {"offset": p.offset, "rows": p.rows, "cols": p.columns, "matrices": p.matrices}
        return {**shape, "matrix": matrix}

    @staticmethod
    def _value(v: PlacedValue) -> dict[str, int]:
        """The fields of a struct ckdist_value."""
        place = native.lib.ckdist_place_activations if v.operand else native.lib.ckdist_place_arena
        return {
            "place": place,
            "offset": v.offset,
            "width": v.width,
            "room": v.room,
            "stride": v.stride,
            "kept": v.kept,
        }

    def _rope(self, rope: RopeSpec | None) -> dict[str, Any]:
        """The fields of a `struct ckdist_rope`: float32 (max_tokens, dims / 2) each of cosines and sines."""
        if rope is None:
            return {}
        angles = np.arange(self.program.max_tokens, dtype=np.float32)[:, None] * rope.inverse_frequencies.astype(
            np.float32
        )
        cos, sin = (function(angles) * np.float32(rope.magnitude) for function in (np.cos, np.sin))
        self._keep.append((cos, sin))
        return {
            "cos": native.pointer(cos, "float *"),
            "sin": native.pointer(sin, "float *"),
            "dims": rope.dims,
            "interleaved": rope.interleaved,
        }

    def forward(self, batch: PackedBatch, chunk: int, slot: int) -> None:
        """The forward pass of a chunk of this stage's; what its backward pass reads is kept in one of its slots.

        The errors of `forward_backward`.
        """
        self._run(batch, chunk, slot)

    def forward_backward(self, batch: PackedBatch, reduce: bool = True, chunk: int = 0, slot: int = 0) -> float:
        """The sum of losses of this rank's replica; its gradients are added to `gradients`.

        Of a chunk without the loss 0, and the gradients are of what `forward` left in the slot. With `reduce` these
        then become whole: the sums over all replicas. Raises ConfigError for a batch that does not fit, CommError when
        a rank died or stalled.
        """
        return self._run(batch, chunk, slot, True, reduce)

    def loss(self, batch: PackedBatch) -> float:
        """This rank's sum of losses, and nothing else; 0 where another stage has them."""
        return sum(self._run(batch, chunk) for chunk in range(len(self.program.lowered.chunks)))

    def _run(
        self, batch: PackedBatch, chunk: int, slot: int = 0, backward: bool = False, reduce: bool = False
    ) -> float:
        """The sum of losses of one pass; the errors of `forward_backward`."""
        ids, targets, starts = (
            np.ascontiguousarray(a, np.int32) for a in (batch.token_ids, batch.targets, batch.starts)
        )
        if len(ids) != len(targets):
            raise ConfigError(
                f"a batch has {len(ids)} tokens and {len(targets)} targets; "
                "pass one target per token, -1 where there is none"
            )
        if len(starts) < 2:
            raise ConfigError(
                f"a batch has {len(starts)} starts; pass where each sequence begins, and where the last ends"
            )
        if self._handle is None:
            raise ConfigError("this executable is closed")
        given = native.ffi.new(
            "struct ckdist_training_batch *",
            [*(native.pointer(a, "int32_t *") for a in (ids, targets, starts)), len(ids), len(starts) - 1],
        )
        kept = self._kept[chunk] + slot * self.program.lowered.chunks[chunk].kept_bytes
        clear = backward and self._fresh[chunk]
        one_pass = native.ffi.new("struct ckdist_training_pass *", [2 * chunk + backward, clear, reduce, kept])
        out = native.ffi.new("double[2]")
        native.check(native.lib.ckdist_training_run(self._handle, given, one_pass, out))
        if self._pages is not None:
            for begin, end in self._frozen:  # they are packed for good: their pages go back
                self._pages.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        self._frozen = []
        self._fresh[chunk] = self._fresh[chunk] and not backward
        self.balance = out[1]
        if self.program.stage.count > 1:
            seconds = self.times()
            self.waited = seconds["recv_rows"] + seconds["send_rows"]
        return out[0]

    def flush(self) -> None:
        """Waits until other stages have all that was sent. CommError when a rank died or stalled."""
        native.check(native.lib.ckdist_training_flush(self._handle))

    def zero_grad(self) -> None:
        """The next `forward_backward` begins its gradients anew; until then they hold what they held."""
        self._fresh = [True] * len(self._fresh)

    def times(self) -> dict[str, float]:
        """Seconds of the last run by kind of step, and, as a part of these, of packing the weights; "reduce_gradients"
        is what was waited for other ranks.
        """
        out = native.ffi.new(f"double[{_KINDS['kinds'] + 1}]")
        native.lib.ckdist_training_times(self._handle, out)
        return {
            **{name: out[number] for name, number in _KINDS.items() if name != "kinds"},
            "pack": out[_KINDS["kinds"]],
        }

    @property
    def bytes(self) -> TrainingBytes:
        """What this holds beside parameters and gradients."""
        out = native.ffi.new("int64_t[3]")
        native.lib.ckdist_training_bytes(self._handle, out)
        return TrainingBytes(*out)

    def close(self) -> None:
        """Frees threads and buffers; parameters and gradients stay."""
        if self._handle is not None:
            native.lib.ckdist_training_free(self._handle)
            self._handle = None
