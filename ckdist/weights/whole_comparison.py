"""Compares all bytes that ranks compute with, between the copies of a model's files, while weights are packed."""

import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ckdist.comm.agreement import odd_one
from ckdist.comm.world import together
from ckdist.comm.world_protocol import World
from ckdist.layout import Range
from ckdist.weights.copies import Copies, differing_block
from ckdist.weights.kept_weights import KeptWeights
from ckdist.weights.model_files import ModelFile

MAX_READERS = 4  # threads per rank
CHUNK = 16 << 20  # bytes per digest; a multiple of the sampled blocks


class WholeComparison:
    """Reads the copies in the background, from its construction on; `finish` compares them.

    The bytes that the ranks of a copy need are read from this copy and from the next one. So all needed bytes are
    compared with another copy, and each of N copies is read for only two of N parts. The ranks of a copy divide the
    work. Nothing is read if there is only one copy. Files at a URL are left out.
    """

    def __init__(
        self,
        world: World,
        files: Sequence[ModelFile],
        needed: Mapping[Path, Sequence[Range]],
        threads: int,
        kept: KeptWeights | None = None,
    ) -> None:
        """Starts `threads` threads; a collective call.

        `needed` has the bytes of each file that this rank computes with. A file that is not in it is needed whole.
        Nothing is read if all ranks have `kept` weights from one start that has compared them.
        """
        self._kept = kept
        starts = set(world.gather(kept.comparison if kept else ""))
        self._is_done = len(starts) == 1 and "" not in starts
        self._copies = Copies.find(world, files, by_host=False)
        self._chunks: list[tuple[int, Range]] = []  # (index of a file, its bytes)
        self._parts: list[list[np.ndarray]] = []  # the chunks that each rank of each copy reads
        self._digests: list[Future[int]] = []
        if not self.has_copies:
            return
        wanted = np.concatenate([np.zeros(0, bool), *(self._add(i, file, needed) for i, file in enumerate(files))])
        told = world.gather(np.packbits(wanted).tobytes())
        rows = [np.unpackbits(np.frombuffer(row, np.uint8), count=len(wanted)) for row in told]
        needs = [np.any([rows[rank] for rank in ranks], axis=0) for ranks in self._copies.groups]
        for copy, ranks in enumerate(self._copies.groups):
            self._parts.append(np.array_split(np.flatnonzero(needs[copy] | needs[copy - 1]), len(ranks)))
        part = self._parts[self._copies.own][self._copies.groups[self._copies.own].index(world.rank)]
        self._pool = ThreadPoolExecutor(threads, "compare")
        for chunk in part.tolist():
            index, span = self._chunks[chunk]
            self._digests.append(self._pool.submit(files[index].digest, span))

    def _add(self, index: int, file: ModelFile, needed: Mapping[Path, Sequence[Range]]) -> np.ndarray:
        """Divides a file into chunks; returns bool (n,), whether this rank needs each chunk."""
        if not file.tensors or file.is_partial:
            return np.zeros(0, bool)
        begins = range(0, file.size, CHUNK)
        wanted = np.zeros(len(begins), bool)
        for begin, end in needed.get(file.path, [(0, file.size)]):
            if begin < end:
                wanted[begin // CHUNK : -(-end // CHUNK)] = True
        self._chunks += [(index, (begin, min(begin + CHUNK, file.size))) for begin in begins]
        return wanted

    @property
    def has_copies(self) -> bool:
        """True if there is more than one copy, and they were not compared before."""
        return len(self._copies.groups) > 1 and not self._is_done

    def finish(self) -> None:
        """Waits for all ranks and compares the copies; a collective call.

        Raises:
            ModelFileError: There is a difference. The message, equal on all ranks, names host, file and tensor of the
                first.
        """
        copies = self._copies
        if not self.has_copies:
            return
        own = together(copies.world, lambda: [future.result() for future in self._digests])
        self._pool.shutdown()
        told = copies.world.gather(np.array(own, np.uint64).tobytes())
        digests = np.zeros((len(copies.groups), len(self._chunks)), np.uint64)
        read = np.zeros(digests.shape, bool)
        for copy, ranks in enumerate(copies.groups):
            for rank, part in zip(ranks, self._parts[copy], strict=True):
                digests[copy, part] = np.frombuffer(told[rank], np.uint64)
                read[copy, part] = True
        most = digests.max(axis=0)
        for chunk in np.flatnonzero((read & (digests != most)).any(axis=0)).tolist():
            readers = np.flatnonzero(read[:, chunk]).tolist()
            pair = odd_one(digests[readers, chunk].tolist())
            assert pair is not None  # one of these digests is not the greatest
            index, span = self._chunks[chunk]
            differing_block(copies, index, (readers[pair[0]], readers[pair[1]]), span)
        names = copies.world.gather(secrets.token_hex(16))
        if self._kept:
            self._kept.name_comparison(names[0])
