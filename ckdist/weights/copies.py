"""Copies of a model's files on several hosts: finds which ranks read the same copy, and compares copies.

All functions here are collective calls of all ranks of a world.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from ckdist.comm.agreement import odd_one
from ckdist.comm.host_name import rank_on_host
from ckdist.comm.world import together
from ckdist.comm.world_protocol import World
from ckdist.errors import ModelFileError
from ckdist.layout import Range
from ckdist.weights.model_files import BLOCK, ModelFile

REMEDY = "copy the model again, so that all hosts have the same bytes"


@dataclass(frozen=True)
class Copies:
    """The copies of `files` that the ranks of `world` read.

    Attributes:
        groups: The ranks that read each copy, in the order of their first ranks.
        own: Index of the copy that this rank reads.
    """

    world: World
    files: Sequence[ModelFile]
    groups: list[list[int]]
    own: int

    @classmethod
    def find(cls, world: World, files: Sequence[ModelFile], by_host: bool) -> "Copies":
        """Finds the copies. If `by_host`, hosts that read the same file from a file server count as separate copies."""
        identities = together(world, lambda: [[file.name, *file.identity()] for file in files])
        keys = world.gather(repr([identities, world.hosts[world.rank] if by_host else ""]))
        groups: dict[str, list[int]] = {}
        for rank, key in enumerate(keys):
            groups.setdefault(key, []).append(rank)
        return cls(world, files, list(groups.values()), list(groups).index(keys[world.rank]))

    @property
    def readers(self) -> list[int]:
        """The first rank of each copy."""
        return [ranks[0] for ranks in self.groups]

    @property
    def reads(self) -> bool:
        """True if this rank reads its copy for the others."""
        return self.world.rank in self.readers

    def gather(self, value: object) -> list[Any]:
        """The value of each copy's reader."""
        values = self.world.gather(value if self.reads else None)
        return [values[rank] for rank in self.readers]


def compare_samples(world: World, files: Sequence[ModelFile]) -> bool:
    """Compares names and sizes of the files, all bytes of small files and headers, and sampled blocks of each tensor.

    Returns:
        Whether there are several copies.

    Raises:
        ModelFileError: There is a difference. The message, equal on all ranks, names host, file and byte of the first.
    """
    copies = Copies.find(world, files, by_host=True)
    if len(copies.groups) == 1:
        return False
    rows = copies.gather([[file.name, file.size, file.version, str(file.path)] for file in files])
    listed = [{name: more for name, *more in row} for row in rows]
    for name in dict.fromkeys(name for row in listed for name in row):
        _compare_names(copies, [row.get(name) for row in listed], name)
    begins = [file.sample(len(files)) for file in files]
    digests = together(
        world, lambda: [f.digests(at) for f, at in zip(files, begins, strict=True)] if copies.reads else []
    )
    for index, totals in enumerate(zip(*copies.gather([_total(found) for found in digests]), strict=True)):
        if pair := odd_one(totals):
            found = copies.gather(digests[index].tobytes() if copies.reads else None)
            block = _first_difference([np.frombuffer(found[copy], np.uint64) for copy in pair])
            _refuse(copies, index, pair, int(begins[index][block]))
    return True


def _compare_names(copies: Copies, entries: list[list[Any] | None], name: str) -> None:
    """Raises ModelFileError if one copy lacks a file, or has it in another size or version."""
    pair = odd_one([None if entry is None else tuple(entry[:2]) for entry in entries])
    if pair is None:
        return
    (a, b), where = (entries[copy] for copy in pair), [_host(copies, copy) for copy in pair]
    if a is None:
        raise ModelFileError(f"{where[0]} has no {name}, and {where[1]} has {b and b[2]}: {REMEDY}")
    if b is None:
        raise ModelFileError(f"{where[1]} has no {name}, and {where[0]} has {a[2]}: {REMEDY}")
    if a[0] != b[0]:
        raise ModelFileError(f"{where[0]}: {a[2]} has {a[0]} bytes, and on {where[1]} it has {b[0]}: {REMEDY}")
    raise ModelFileError(
        f"{where[0]}: the server gives {a[2]} the version {a[1]}, and on {where[1]} {b[1]}: "
        "use a server that gives all hosts the same file"
    )


def differing_block(copies: Copies, index: int, pair: tuple[int, int], span: Range) -> NoReturn:
    """Raises ModelFileError for two copies that differ in bytes [begin, end) of a file."""
    begins = np.arange(span[0], span[1], BLOCK)
    reads = copies.world.rank in [copies.readers[copy] for copy in pair]
    own = together(copies.world, lambda: copies.files[index].digests(begins).tobytes() if reads else b"")
    found = copies.gather(own)
    block = _first_difference([np.frombuffer(found[copy], np.uint64) for copy in pair])
    _refuse(copies, index, pair, int(begins[block]))


def _refuse(copies: Copies, index: int, pair: tuple[int, int], begin: int) -> NoReturn:
    """Raises ModelFileError for two copies of a file that differ in the block at `begin`."""
    file = copies.files[index]
    own = together(copies.world, lambda: file.block(begin) if copies.reads else b"")
    rows = copies.gather([own, str(file.path)])
    blocks = [np.frombuffer(rows[copy][0], np.uint8) for copy in pair]
    byte = begin + _first_difference(blocks)
    tensor = copies.world.broadcast(file.tensor_at(byte))
    place = f"byte {byte}, in tensor {tensor}" if tensor else f"byte {byte}"
    raise ModelFileError(
        f"{_host(copies, pair[0])}: {rows[pair[0]][1]} differs from that on {_host(copies, pair[1])} at {place}: "
        f"{REMEDY}"
    )


def _host(copies: Copies, copy: int) -> str:
    return rank_on_host(copies.world, copies.readers[copy])


def _total(digests: np.ndarray) -> bytes:
    return hashlib.sha256(digests.tobytes()).digest()


def _first_difference(pair: list[np.ndarray]) -> int:
    """The first index at which two arrays differ."""
    count = min(len(one) for one in pair)
    differs = np.flatnonzero(pair[0][:count] != pair[1][:count])
    return int(differs[0]) if len(differs) else max(0, count - 1)
