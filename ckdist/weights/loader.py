"""Packs a rank's shard of a checkpoint, from mapped files into tiles in local memory.

1. `add_matrix` and `add_vector` plan the parts. Other modules decide which rank has which part.
2. `open` allocates one arena. From then on the handles have addresses, which are valid as long as the ShardLoader.
3. Native threads fill the arena. `load` waits for them, `repack` does not. An executable with this loader uses the
   packed matrices, and packs the others itself when it needs them.
"""

import contextlib
import logging
import os
import pathlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ckdist.errors import ConfigError, LayoutError
from ckdist.hub.local_copy import has_parts
from ckdist.layout import Range
from ckdist.models.decoder import EMBEDDING, MAPPED, OUTPUT
from ckdist.models.moe_weights import is_router
from ckdist.native import address, call, check, ffi, lib, new
from ckdist.weights import dtypes
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.handles import MatrixHandle, VectorHandle
from ckdist.weights.tensor_source import Place, TensorSource

if TYPE_CHECKING:  # few files have scales apart from their codes
    from ckdist.weights.kept_weights import KeptWeights

log = logging.getLogger(__name__)

QUANTIZATIONS = {"q8_0": dtypes.Q8_0, "q4_k": dtypes.Q4_K}
_POLL_MILLISECONDS = 100


@dataclass(frozen=True)
class Filled:
    """Progress of packing an arena."""

    bytes: int  # in total
    ready: int  # bytes packed so far
    kept: int  # bytes packed by this rank's steps, for its own arena or another rank's
    seconds: float  # from the start of packing to now, or to its end
    finished: bool  # on this rank and all ranks whose arenas it reads

    @property
    def fraction(self) -> float:
        """The ratio ready / bytes, from 0 to 1. 1 if there are no bytes."""
        return self.ready / self.bytes if self.bytes else 1.0

    def stats(self) -> dict[str, float]:
        """The values by the names of metrics."""
        return {
            "weights_bytes": self.bytes,
            "weights_packed_bytes": self.ready,
            "weights_packed_ratio": self.fraction,
            "weights_packed_by_steps_bytes_total": self.kept,
        }

    def __str__(self) -> str:
        kept = f", {self.kept / 1e9:.2f} GB of it by steps" if self.kept else ""
        return f"weights are packed: {self.bytes / 1e9:.2f} GB in {self.seconds:.2f} s{kept}"


class ShardLoader:
    """Loads parts of a checkpoint.

    Args:
        checkpoint: The model on disk.
        threads: Number of native threads that pack.
        quantize: q8_0 or q4_k for matrices stored in F32, F16 or BF16, or as codes and scales; None: keep their type.
            With q4_k, the embedding, the output matrix, and matrices whose rows are no multiple of 256 become q8_0.
    """

    def __init__(self, checkpoint: Checkpoint, threads: int, quantize: str | None = None):
        if quantize is not None and quantize not in QUANTIZATIONS:
            raise ConfigError(f"quantize is {quantize!r}; it must be one of {', '.join(QUANTIZATIONS)}")
        self.checkpoint = checkpoint
        self.threads = threads
        self.quantize = quantize
        self._files = {
            path: i for i, path in enumerate(sorted({p for s in checkpoint.tensors.values() for p in s.files}))
        }
        # By planned part. Weak references: a handle keeps its loader alive, not the other way.
        self._matrices = weakref.WeakValueDictionary[tuple[Any, ...], MatrixHandle]()
        self._vectors = weakref.WeakValueDictionary[tuple[Any, ...], VectorHandle]()
        self.planned: list[tuple[TensorSource, Sequence[Range], Sequence[int], Range, int]] = []  # and columns, type
        self.kept: KeptWeights | None = None
        self._open = False
        self._reporter: threading.Thread | None = None
        # before they are opened, which fails if one is missing
        self.stamps = {path: path.stat() for path in self._files if path.exists()}
        paths = [os.fsencode(path) for path in self._files]
        self._native = new(lib.ckdist_loader_create, paths, len(paths))
        for path, number in self._files.items():
            if has_parts(path):
                check(lib.ckdist_loader_expect_writes(self._native, number))

    def type_of(self, name: str) -> int:
        """The ggml number of the type that matrix `name` is packed in. Columns are sharded at its block boundaries."""
        return planned_type(name, self.checkpoint.tensors[name], self.quantize)

    def add_matrix(
        self,
        name: str,
        row_ranges: Sequence[tuple[int, int]],
        col_range: tuple[int, int] | None = None,
        matrices: tuple[int, int] | None = None,
    ) -> MatrixHandle:
        """Plans a part of a matrix or of a stack.

        The same part of a tensor is planned only once; tied embeddings are one tensor. Each matrix of a stack begins a
        new tile.

        Args:
            name: Name of the weight.
            row_ranges: Ranges of rows, packed one after another.
            col_range: Range of columns. None: all.
            matrices: Range of matrices of a stack. None: all.

        Raises:
            LayoutError: The columns are not whole blocks of `type_of(name)`.
        """
        source = self.checkpoint.tensors[name]
        cols = source.shape[-1]
        ranges = tuple((int(begin), int(end)) for begin, end in row_ranges)
        begin, end = (0, cols) if col_range is None else map(int, col_range)
        chosen = range(*(matrices or (0, len(source.places))))
        key = (source.name, ranges, begin, end, chosen)
        if (known := self._matrices.get(key)) is not None:
            return known
        packed = dtypes.BY_NUMBER[self.type_of(name)]
        transposed = source.part is not None and source.part.transposed
        numbers = [packed.number] if transposed else [packed.number, source.type]
        block = max(lib.ckdist_type_undivided_columns(number) for number in numbers)
        if begin % block or (end % block and end != cols):
            blocks = f"{packed.name}, which has blocks of {block}"
            raise LayoutError(
                f"columns [{begin}, {end}) of {name} cannot be sharded from {blocks}: shard at multiples of {block}"
            )
        plan = self._matrix_plan(name, ranges, begin, end, chosen)
        index = call(lib.ckdist_loader_add_matrix, self._native, plan)
        rows = len(chosen) * sum(e - b for b, e in ranges)
        self.planned.append((source, ranges, chosen, (begin, end), packed.number))
        handle = MatrixHandle(self, index, packed.number, rows, (begin, end))
        self._matrices[key] = handle
        return handle

    def _matrix_plan(
        self, name: str, ranges: Sequence[tuple[int, int]], begin: int, end: int, chosen: range
    ) -> dict[str, Any]:
        """The fields of the native plan of a part of the matrices `chosen`."""
        source = self.checkpoint.tensors[name]
        rows, cols = source.shape[-2:]
        files, offsets = self._places([source.places[index] for index in chosen])
        return {
            "name": name, "count": len(chosen), "files": files, "offsets": offsets,
            "scales": source.scales.plan(name, chosen, self._places, end - begin) if source.scales else None,
            "source_type": source.type, "packed_type": self.type_of(name), "head_rows": source.head_rows,
            "part": source.part or {},
            "rows": rows, "cols": cols, "col_begin": begin, "col_end": end,
            "row_ranges": np.array(ranges, np.int64).reshape(-1, 2), "range_count": len(ranges),
            "cold": name == EMBEDDING and self._untied, "mapped": name in MAPPED,
        }  # fmt: skip

    def _places(self, places: Sequence[Place]) -> tuple[np.ndarray, np.ndarray]:
        """File numbers, int32 (matrices,), and offsets, int64 (matrices,)."""
        files = np.array([self._files[path] for path, _ in places], np.int32)
        return files, np.array([offset for _, offset in places], np.int64)

    @property
    def _untied(self) -> bool:
        """True if the embedding is not the output matrix too. A step then reads only a few of its rows."""
        tensors = self.checkpoint.tensors
        return OUTPUT in tensors and tensors[OUTPUT] is not tensors[EMBEDDING]

    def add_vector(self, name: str, begin: int = 0, end: int | None = None) -> VectorHandle:
        """Plans elements [begin, end) of a vector as float32 (`end` None: to its end). A part is planned only once."""
        source = self.checkpoint.tensors[name]
        (size,) = source.shape
        end = size if end is None else end
        key = (source.name, int(begin), int(end))
        if (known := self._vectors.get(key)) is not None:
            return known
        self.planned.append((source, [(begin, end)], (0,), (0, 1), 0))
        plan = {
            "name": name, "file": self._files[source.file],
            "source_type": source.type, "head_rows": source.head_rows,
            "stored": source.part.stored if source.part else 0, "lane": source.part.first if source.part else 0,
            "plus_one": source.plus_one, "exp_sign": source.exp_sign, "factor": source.factor,
            "offset": source.offset, "size": size, "begin": begin, "end": end,
        }  # fmt: skip
        handle = VectorHandle(self, call(lib.ckdist_loader_add_vector, self._native, plan), end - begin)
        self._vectors[key] = handle
        return handle

    @property
    def planned_bytes(self) -> int:
        """Bytes of the arena."""
        return lib.ckdist_loader_arena_bytes(self._native)

    @property
    def arena(self) -> Any:
        """Address of the arena; null before `open`."""
        return lib.ckdist_loader_arena(self._native)

    @property
    def path(self) -> str:
        """The arena's path for other ranks of this host; empty unless it is open and shared."""
        return cast("bytes", ffi.string(lib.ckdist_loader_path(self._native))).decode()  # bytes, of a char *

    def open(self, shared: bool = False) -> None:
        """Allocates the arena and reads the vectors; call it once. Fetches the planned bytes of files at a URL first.

        Args:
            shared: Other ranks of the host can map the arena by its `path`.

        Raises:
            CapacityError: There is not enough memory.
            ModelFileError: A file has become shorter.
            FetchError: A URL cannot be read.
        """
        self._fetch()
        kept = self.kept.path if self.kept else ""
        check(lib.ckdist_loader_open(self._native, shared or self.kept is not None, os.fsencode(kept)))
        self._open = True
        if self.kept:
            self.kept.hand_over(self, lib.ckdist_loader_kept_bytes(self._native))

    def byte_ranges(self) -> dict[pathlib.Path, list[Range]]:
        """The planned byte ranges of each file of the model."""
        wanted: dict[pathlib.Path, list[Range]] = {path: [] for path in self._files}
        for source, rows, matrices, *_ in self.planned:
            for path, part in source.byte_ranges(rows, matrices):
                wanted[path].append(part)
        return wanted

    def _fetch(self) -> None:
        """Fetches the planned bytes of files at a URL."""
        for path, ranges in self.byte_ranges().items():
            if has_parts(path):
                from ckdist.hub.remote_file import fetch_ranges

                fetch_ranges(path, ranges, show_progress=True)

    def add_peer(self, path: str, arena_bytes: int) -> int:
        """Maps the arena of another rank of this host; returns the number of the peer.

        `arena_bytes` is the peer's `planned_bytes`.
        """
        return call(lib.ckdist_loader_add_peer, self._native, path, arena_bytes)

    def peer_arena(self, peer: int) -> Any:
        """Address of a peer's arena."""
        return lib.ckdist_loader_peer_arena(self._native, peer)

    def add_peer_matrix(
        self,
        peer: int,
        name: str,
        row_range: tuple[int, int],
        col_range: tuple[int, int],
        place: Sequence[int],
        matrices: tuple[int, int] | None = None,
    ) -> Any:
        """The native `struct ckdist_matrix` of a part that a peer packs at `place` of its arena.

        Call it before `load` or `repack`.
        """
        chosen = range(*(matrices or (0, len(self.checkpoint.tensors[name].places))))
        plan = self._matrix_plan(name, (row_range,), *col_range, chosen)
        return call(lib.ckdist_loader_add_peer_matrix, self._native, peer, plan, *place[4:])

    def load(self, progress: bool = True, trace: Any = None) -> int:
        """Packs everything that was planned, and waits until this is done; call it once. Returns the bytes read.

        Args:
            progress: Show a progress bar if the output is a terminal.
            trace: The native trace that records the threads.

        Raises:
            CapacityError: There is not enough memory.
            ModelFileError: A file has become shorter, or a value cannot be quantised.
        """
        from ckdist.progress import ProgressBar

        began = time.perf_counter()
        if not self._open:
            self.open()
        total = lib.ckdist_loader_source_bytes(self._native)
        self._fill(background=False, until=1.0, trace=trace)
        with ProgressBar(total, "B", "quantising" if self.quantize else "packing", progress) as bar:
            while not check(lib.ckdist_loader_wait(self._native, _POLL_MILLISECONDS)):
                bar.update(self._filled().stored_done - bar.n)
            bar.update(total - bar.n)
        filled, seconds = self.planned_bytes / 1e9, time.perf_counter() - began
        log.debug("%.2f GB became %.2f GB in %.2f s with %d threads", total / 1e9, filled, seconds, self.threads)
        return total

    def repack(
        self,
        until: float = 1.0,
        trace: Any = None,
        on_finished: Callable[[Filled], None] | None = None,
    ) -> None:
        """Starts to pack everything in the background, while executables run; call it once, after `open`.

        Args:
            until: Fraction of the bytes after which it stops.
            trace: The native trace that records the threads.
            on_finished: Called by another thread when this rank and all ranks whose arenas it reads are finished.
        """
        self._fill(background=True, until=until, trace=trace)
        self._reporter = threading.Thread(target=self._report, args=[on_finished], name="repacker", daemon=True)
        self._reporter.start()

    def _fill(self, background: bool, until: float, trace: Any) -> None:
        self._trace = trace
        call(lib.ckdist_loader_fill, self._native, [[self.threads, background, until, trace]])

    def wait(self) -> None:
        """Waits until packing has ended. Raises the error that it failed with."""
        while not check(lib.ckdist_loader_wait(self._native, _POLL_MILLISECONDS)):
            pass

    def check(self) -> None:
        """Raises the error that packing failed with, or ModelFileError if a file that is still needed has changed."""
        check(lib.ckdist_loader_check(self._native))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Pauses background packing within the block, for measurements. Steps still keep the parts that they pack."""
        lib.ckdist_loader_hold(self._native, True)
        try:
            yield
        finally:
            lib.ckdist_loader_hold(self._native, False)

    def close(self) -> None:
        """Stops packing. Packed parts stay valid."""
        lib.ckdist_loader_stop(self._native)
        if self._reporter is not None:
            self._reporter.join()

    def free(self) -> None:
        """Stops packing and frees all parts. No handle is valid any longer."""
        self.close()
        ffi.release(self._native)

    @property
    def filled(self) -> Filled:
        """The progress of packing."""
        out = self._filled()
        return Filled(out.bytes, out.ready, out.kept, out.seconds, bool(out.finished))

    def _filled(self) -> Any:
        return call(lib.ckdist_loader_filled, self._native)

    def _report(self, on_finished: Callable[[Filled], None] | None) -> None:
        """Calls the callback once when packing has ended. The steps raise an error of packing, not this thread."""
        while (status := lib.ckdist_loader_wait(self._native, _POLL_MILLISECONDS)) == 0:
            pass
        out = self._filled()
        if status > 0 and out.finished and on_finished:
            on_finished(self.filled)

    def offset_of(self, pointer: Any) -> int:
        """The offset of an address in the arena, in bytes."""
        return address(pointer) - address(self.arena)

    def native_open(self) -> Any:
        """The native loader. It must be open: before, handles have no address."""
        assert self._open, "open() comes before the addresses of what is planned"
        return self._native

    @property
    def handle(self) -> Any:
        """The native loader, for an executable that runs while weights are packed."""
        return self._native


def planned_type(name: str, source: TensorSource, quantize: str | None = None) -> int:
    """The ggml number of the type that a matrix is packed in. `quantize` is that of ShardLoader."""
    wanted = None if quantize is None or name in MAPPED else QUANTIZATIONS[quantize]
    if dtypes.BY_NUMBER[source.type] not in dtypes.FLOATS:
        if source.part is not None and source.part.transposed:  # its blocks run along the other dimension
            return (dtypes.F32 if source.shape[1] % dtypes.Q8_0.block_elements else dtypes.Q8_0).number
        if source.scales and wanted:
            return wanted.number if source.shape[-1] % wanted.block_elements == 0 else dtypes.Q8_0.number
        return source.type
    if wanted is None:
        return dtypes.F32.number if is_router(name) else source.type
    return quantized_type(name, source.shape[-1], wanted, dtypes.BY_NUMBER[source.type]).number


def quantized_type(name: str, columns: int, wanted: dtypes.TensorType, stored: dtypes.TensorType) -> dtypes.TensorType:
    """The type that a float matrix is quantised to.

    `wanted`, with these exceptions: F32 for a router; Q8_0 in place of Q4_K for the embedding and the output matrix,
    and for rows that are no multiple of 256; `stored` if the columns are no multiple of the block.
    """
    if is_router(name):
        return dtypes.F32
    indivisible = wanted.block_elements > dtypes.Q8_0.block_elements and columns % wanted.block_elements
    if indivisible or (wanted is dtypes.Q4_K and name in (EMBEDDING, OUTPUT)):
        wanted = dtypes.Q8_0
    return wanted if columns % wanted.block_elements == 0 else stored
