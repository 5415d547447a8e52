"""Checkpoints of a running training: every rank writes its part while training goes on; the next start reads them.

The weights and the optimizer's state are copied first. If the copy does not fit into memory, the step waits for the
disk. The next checkpoint waits for the one before it.
"""

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ckdist.comm.world_protocol import World
from ckdist.errors import EngineError
from ckdist.hub.store import sha256_of
from ckdist.layout import Range, even_ranges
from ckdist.layouts.memory_sizes import free_memory, gigabytes
from ckdist.regular_file import sync
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.train.arena import ALIGNMENT, Arena, assign
from ckdist.train.checkpoint_parts import DTYPES, PARTS, TYPES, Part, SavedTensors, write_parts
from ckdist.train.config import TrainConfig
from ckdist.train.model import TrainedModel
from ckdist.train.model_folder import write_result
from ckdist.train.moments import state_shapes
from ckdist.train.optimizer import Optimizer
from ckdist.train.ranks import TrainingRanks
from ckdist.train.shards import Shaped, Shards
from ckdist.train.training_checkpoint import Folder, TrainState, disk_reason, verify

log = logging.getLogger(__name__)

PARTS_TAG = 1002
NICE = 5  # of the writing thread, so that it takes little time from the threads that compute
WEIGHTS = "weights"


class Saved(NamedTuple):
    """A complete checkpoint: its folder, its step, the seconds until it was complete, and those without training."""

    path: Path
    step: int
    seconds: float
    paused: float


class _Writing(threading.Thread):
    """This rank's part of one checkpoint.

    Attributes:
        checksums: SHA-256 of each written file.
        error: The reason why they could not be written.
        paused: Seconds until training went on.
    """

    def __init__(self, state: TrainState, write: Callable[[], dict[str, str]]) -> None:
        super().__init__(daemon=True, name="ckdist-checkpoint")
        self.state, self._write = state, write
        self.checksums: dict[str, str] = {}
        self.error = ""
        self.began, self.paused = time.perf_counter(), 0.0

    def run(self) -> None:
        """Writes."""
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            self.checksums = self._write()
        except OSError as error:
            self.error = disk_reason(error)
        except Exception as error:  # the ranks' own threads raise it
            self.error = str(error) or type(error).__name__


class CheckpointWriter:
    """One rank's checkpoints.

    Args:
        folder: The folder of the checkpoints; None on other ranks than the first.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        ranks: TrainingRanks,
        folder: Folder | None,
        model: TrainedModel,
        tokenizer: Tokenizer,
        shards: Shards,
        optimizer: Optimizer,
    ) -> None:
        self.config, self.world, self.ranks, self.folder = config, world, ranks, folder
        self.model, self.tokenizer, self.shards = model, tokenizer, shards
        self.parameters, self.optimizer = optimizer.parameters, optimizer  # this rank's shards of the weights
        self._writing: _Writing | None = None
        self._has_warned = False

    # Reading

    def load(self, folder: Path, updates: int) -> None:
        """Loads the weights and the optimizer's state. `updates`: its steps so far. A collective call."""
        tensors = SavedTensors(folder) if self.world.rank == 0 else None
        own = (self.optimizer.begin, self.optimizer.end)
        self._read(tensors, WEIGHTS, self.parameters, own=own if self.optimizer.gathers else None)
        for name, flat in self.optimizer.state.items():
            if self.optimizer.whole is None:
                state = Arena(self.parameters.shapes)
                self._read(tensors, name, state, own=own if self.optimizer.sharded else None)
                flat[:] = state.flat[slice(*own)]
            else:
                shaped = functools.partial(state_shapes, self.config.optim, name)
                self._read(tensors, name, Arena(self.optimizer.state_shapes(name), flat), shaped)
        self.optimizer.steps = updates

    def load_last(self, step: int) -> TrainState | None:
        """Loads the last checkpoint of at most `step` steps. Returns its state, or None if there is none.

        A collective call.
        """
        steps = [] if self.folder is None else [found for found in self.folder.steps() if found <= step]
        (values, *_) = self.ranks.gather(vars(verify(self.folder.at(steps[-1]))) if self.folder and steps else None)
        if values is None:
            return None
        state = TrainState(**values)
        self.load(Path(self.config.output_dir, f"checkpoint-{state.step}"), state.updates)
        return state

    def _read(
        self,
        tensors: SavedTensors | None,
        group: str,
        into: Arena,
        shaped: Shaped | None = None,
        own: Range | None = None,
    ) -> None:
        """Fills the elements `own` (default: all) of `into` from a group of tensors. Rank 0 reads them."""
        shapes = self.shards.whole_shapes
        for name, shape in (shaped(shapes) if shaped else shapes).items():
            whole = np.empty(shape, np.float32) if tensors is None else tensors(f"{group}.{name}", shape)
            if self.ranks.every is not None:
                self.ranks.every.broadcast(whole)
            if name in into:
                begin, end = into.places[name]
                low, high = (begin, end) if own is None else (min(max(edge, begin), end) for edge in own)
                part = whole if shaped else self.shards.part(name, whole)
                assign(into.flat[low:high], part.reshape(-1)[low - begin : high - begin])

    def gathered(self) -> Arena | None:
        """The whole weights of the first replica on rank 0; None on others. A collective call.

        They are in a file if memory does not hold them.
        """
        folder = Path(self.config.output_dir)

        def make(shapes: dict[str, tuple[int, ...]]) -> Arena:
            dtype = self.parameters.flat.dtype
            fits = dtype.itemsize * Arena.size(shapes.values()) <= free_memory(self.world.local_size)
            return Arena(shapes, dtype=dtype) if fits else Arena.in_file(shapes, dtype, folder)

        try:
            own = self.optimizer.gathered(folder)
            if own is None or not self.ranks.has_first_tokens:
                return None
            return self.shards.gather(own, self.ranks.replica, make)
        except OSError as error:
            raise EngineError(
                f"the weights could not be gathered in {self.config.output_dir}: {disk_reason(error)}"
            ) from None

    # Writing

    def save(self, state: TrainState) -> Saved | None:
        """Starts to write a checkpoint, after the one before it. Returns and raises as `wait`. A collective call."""
        said = self.wait()
        began = time.perf_counter()
        whole = self.gathered()
        weights = whole if self.folder is not None else None
        stretches = list(self._stretches())
        is_shared = weights is self.parameters  # else it was gathered, and nothing changes it
        is_own = stretches[0][-1].size == self.parameters.flat.size  # the first copy has all weights
        copied = [flat for *_, flat in stretches] + ([self.parameters.flat] if is_shared and not is_own else [])
        size = sum(flat.nbytes for flat in copied)
        fits = size <= free_memory(self.world.local_size)
        if fits:
            stretches = [(group, shapes, begin, flat.copy()) for group, shapes, begin, flat in stretches]
            if is_shared:
                copy = stretches[0][-1] if is_own else self.parameters.flat.copy()
                weights = Arena(self.parameters.shapes, copy)
        elif not self._has_warned:
            self._has_warned = True
            log.warning(
                "training waits while checkpoints are written: a copy takes %s, and %s are free",
                gigabytes(size), gigabytes(max(0, free_memory(self.world.local_size))),
            )  # fmt: skip
        (path, *_) = self.ranks.gather(str(self.folder.begin(state.step)) if self.folder is not None else None)
        target = Path(path)
        parts = self._with_others([part for stretch in stretches for part in self._parts(*stretch)], target.is_dir())
        self._writing = _Writing(state, lambda: self._write(target, parts, weights))
        self._writing.start()
        if not fits:
            self._writing.join()
        self._writing.paused = time.perf_counter() - began
        return said

    def _stretches(self) -> Iterator[tuple[str, Mapping[str, tuple[int, ...]], int, np.ndarray]]:
        """This rank's stretches of arenas: (group, shapes of the arrays, first element, elements).

        Replicas, and ranks that divide sequences, hold the same arenas, so each writes its part.
        """
        same, shapes = self.ranks.data, self.parameters.shapes
        ranks, own_rank = (same.size, same.rank) if same is not None else (1, 0)

        def own_part(flat: np.ndarray) -> tuple[int, np.ndarray]:
            begin, end = even_ranges(flat.size, ranks, ALIGNMENT)[own_rank]
            return begin, flat[begin:end]

        if self.optimizer.sharded:
            begin, end = self.optimizer.begin, self.optimizer.end
            yield WEIGHTS, shapes, begin, self.parameters.flat[begin:end]
        else:
            yield WEIGHTS, shapes, *own_part(self.parameters.flat)
        for name, own in self.optimizer.state.items():
            stored = self.optimizer.state_shapes(name)
            if self.optimizer.sharded:
                yield name, stored, 0 if self.optimizer.whole else self.optimizer.begin, own
            else:
                yield name, stored, *own_part(own)

    def _parts(self, group: str, shapes: Mapping[str, tuple[int, ...]], begin: int, flat: np.ndarray) -> Iterator[Part]:
        """The parts of tensors in the elements from `begin` on of an arena."""
        whole = self.shards.whole_shapes
        for name, (first, last) in Arena.places_of(shapes).items():
            low, high = max(first, begin), min(last, begin + flat.size)
            if low >= high:
                continue
            is_shard = group == WEIGHTS or self.optimizer.whole is None
            shape = whole[name] if is_shard else shapes[name]
            spans = self.shards.spans(name) if is_shard else tuple((0, size) for size in shape)
            yield Part(f"{group}.{name}", shape, spans, low - first, flat[low - begin : high - begin])

    def _with_others(self, parts: list[Part], sees: bool) -> dict[int, Sequence[Part]]:
        """Rank -> the parts that this rank writes. Rank 0 receives those of ranks that do not see its folder."""
        every, rank = self.ranks.every, self.world.rank
        form = lambda values: [TYPES[values.dtype], values.nbytes]
        places = [[part.tensor, part.shape, part.spans, part.begin, *form(part.values)] for part in parts]
        tables = self.ranks.gather(None if sees else places)
        if every is not None and not sees:
            every.send(np.concatenate([part.values.view(np.uint8) for part in parts]), 0, PARTS_TAG)
            return {}
        found: dict[int, Sequence[Part]] = {rank: parts}
        for other, table in enumerate(tables):
            if every is None or rank or table is None:
                continue
            sizes = [place[-1] for place in table]
            values = every.recv(np.empty(sum(sizes), np.uint8), other, PARTS_TAG)
            pieces = np.split(values, np.cumsum(sizes)[:-1])
            found[other] = [
                Part(name, tuple(shape), tuple(map(tuple, spans)), begin, piece.view(DTYPES[dtype]))
                for (name, shape, spans, begin, dtype, _), piece in zip(table, pieces, strict=True)
            ]
        return found

    def _write(self, folder: Path, parts: Mapping[int, Sequence[Part]], weights: Arena | None) -> dict[str, str]:
        """Writes this rank's part, and on rank 0 the model. Returns the checksum of each file. Raises OSError."""
        sums: dict[str, str] = {}
        for rank, own in parts.items():
            sums |= write_parts(folder, rank, own)
        if weights is not None:
            write_result(folder, self.model, weights, self.tokenizer, self.config, inside=True)
            for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.parent.name != PARTS):
                sync(path)
                sums[str(path.relative_to(folder))] = sha256_of(path)
        return sums

    @property
    def is_writing(self) -> bool:
        """True while this rank writes its part."""
        return self._writing is not None and self._writing.is_alive()

    def wait(self) -> Saved | None:
        """Ends the checkpoint that is being written, and returns it; None if there is none. A collective call.

        Raises EngineError on all ranks if a rank could not write its part.
        """
        if self._writing is None:
            return None
        self._writing.join()
        done, self._writing = self._writing, None
        results = self.ranks.gather([done.checksums, done.error])
        (failure, *_) = self.ranks.gather(self._finish(done.state, results))
        if failure:
            raise EngineError(failure)
        path = Path(self.config.output_dir, f"checkpoint-{done.state.step}")
        return Saved(path, done.state.step, time.perf_counter() - done.began, done.paused)

    def _finish(self, state: TrainState, results: list[tuple[dict[str, str], str]]) -> str | None:
        """Names a checkpoint on rank 0. Returns the reason if it cannot be complete.

        `results`: the checksums and the error of each rank.
        """
        if self.folder is None:
            return None
        if error := next((error for _, error in results if error), ""):
            return str(self.folder.failed(state.step, error))
        sums = {name: checksum for own, _ in results for name, checksum in own.items()}
        try:
            self.folder.finish(state, sums, self.config.save_total_limit)
        except EngineError as error:
            return str(error)
        return None
