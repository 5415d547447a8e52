"""LoRA adapters that are loaded into slots while steps run. Each sequence of a step has its own, or none."""

import hashlib
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.models.moe_weights import is_of_mixture
from ckdist.models.spec import ModelSpec
from ckdist.program.lowered import MatrixKey
from ckdist.program.ops.low_rank import padded
from ckdist.program.program import Program
from ckdist.program.tracer import LowRank
from ckdist.weights.adapter_file import MODULES, Matrices, files_of, halves, load_adapter
from ckdist.weights.packed_matrix import SlotMatrix, pack_together, part_of
from ckdist.weights.packed_type import is_low_rank

HEADER_BYTES = 16 << 20  # of an adapter's file, beside its matrices
DIGEST_BYTES = 32
Digest: TypeAlias = bytes


class AdapterSlots:
    """The slots of a rank.

    Attributes:
        low_rank: The linears that adapters may change. Experts are not among them.
        count: Number of slots.
        max_rank: Largest rank of an adapter.
        is_exact: Files of 32 bits are kept in float32, for comparisons.
    """

    def __init__(self, spec: ModelSpec, count: int, max_rank: int) -> None:
        self._spec, self.count, self.max_rank, self.is_exact = spec, count, max_rank, False
        self.low_rank = LowRank(self._rank_of, scale=1.0, slots=count)
        self._shapes: dict[str, tuple[int, ...]] = {}  # of a matrix of the largest rank
        self._places: dict[MatrixKey, SlotMatrix] = {}

    def _rank_of(self, stem: str) -> int:
        return self.max_rank if stem.rpartition(".")[2] in MODULES and not is_of_mixture(stem) else 0

    def check(self, program: Program) -> None:
        """Takes the shapes of matrices from the whole program."""
        self._shapes = {w.name: tuple(d.elements for d in w.dims) for w in program.weights if is_low_rank(w.name)}

    def matrix(self, key: MatrixKey) -> SlotMatrix:
        """The place of a part of a matrix. A second call with the same key returns the same object."""
        if key not in self._places:
            (begin, end), (first, last) = key.rows, key.columns
            self._places[key] = SlotMatrix(end - begin, last - first)
        return self._places[key]

    @property
    def bytes(self) -> int:
        """Bytes of all slots if each holds an adapter of the largest rank for all linears."""
        return sum(place.bytes for place in self._places.values())

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.bytes // self.count

    def load(self, slot: int, folder: Path) -> tuple[Digest, tuple[str, ...]]:
        """Loads an adapter into a slot that no step uses.

        Returns:
            A digest of the adapter's files, and warnings.

        Raises:
            ModelFileError: The adapter cannot be read, does not fit the model or is too large.
        """
        digest = self._digest(folder)
        stored = load_adapter(folder, self._spec, scaled=False)
        if stored.head is not None:
            raise ModelFileError(f"{folder} is a reward model, which scores all requests: start with --lora {folder}")
        tensors = stored.matrices
        for name, tensor in tensors.items():
            self._check(folder, name, tensor)
        tensors = tensors if self.is_exact else _in_halves(tensors)
        parts = {key: _part(key, tensors.get(key.name)) for key in self._places if key.matrices == (slot, slot + 1)}
        packed = iter(pack_together([part for part in parts.values() if part is not None]))
        for key, part in parts.items():
            self._places[key].hold(None if part is None else next(packed), stored.scales.get(key.name, 1.0))
        return digest, stored.notes

    def _digest(self, folder: Path) -> Digest:
        """Reads both files once. Raises ModelFileError if they are larger than an adapter of the model can be."""
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        most = HEADER_BYTES + sum(4 * int(np.prod(shape)) for shape in self._shapes.values())
        *configs, weights = files_of(folder)
        limits = {**dict.fromkeys(configs, HEADER_BYTES), weights: 4 * most}  # a larger rank has a message of its own
        for path, limit in limits.items():
            try:
                size = path.stat().st_size
                if size > limit:
                    raise ModelFileError(f"{path} has {size} bytes, and an adapter of this model has at most {limit}")
                if not path.is_file():
                    raise ModelFileError(f"{path} is not a regular file")
                with path.open("rb") as file:
                    while piece := file.read(1 << 20):
                        digest.update(piece)
            except OSError as error:
                raise ModelFileError(f"{path}: {error.strerror}") from None
            digest.update(size.to_bytes(8, "little"))
        return digest.digest()

    def _check(self, folder: Path, name: str, tensor: np.ndarray) -> None:
        if name not in self._shapes:
            if tensor.ndim > 2 or is_of_mixture(name):
                raise ModelFileError(
                    f"{folder} has {name}, a matrix of experts: start with --lora {folder}, without a name, which "
                    "adds it for all requests"
                )
            raise ModelFileError(
                f"{folder} has {name}, and the model has no such layer: it was trained on another model"
            )
        is_a = name.endswith(".lora_A.weight")
        rank, width = tensor.shape if is_a else tensor.shape[::-1]
        needed = self._shapes[name][1 if is_a else 0]
        if width != needed:
            raise ModelFileError(
                f"{folder}: {name} has shape {list(tensor.shape)}, and the model needs {needed} "
                f"{'columns' if is_a else 'rows'}: it was trained on another model"
            )
        if not np.isfinite(tensor).all():
            raise ModelFileError(f"{folder}: {name} has values that are not finite: save the adapter again")
        if rank > self.max_rank:
            raise ModelFileError(
                f"{folder} has rank {rank} at {name}, more than --max-lora-rank {self.max_rank}: start with "
                f"--max-lora-rank {rank}"
            )


def _in_halves(tensors: Matrices) -> Matrices:
    """The matrices in float16: a step reads those of all its adapters, so their bytes are most of its time."""
    found = dict(tensors)
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight") and a.dtype == np.float32:
            other = name.replace(".lora_A.", ".lora_B.")
            found[name], found[other] = halves(a, tensors[other])
    return found


def _part(key: MatrixKey, tensor: np.ndarray | None) -> np.ndarray | None:
    """The part of a matrix, or None if it is empty. Its rank is rounded up as that of an adapter for all rows."""
    if tensor is None:
        return None
    is_a = key.name.endswith(".lora_A.weight")
    rank = (0, padded(tensor.shape[0 if is_a else 1]))
    rows, columns = (rank, key.columns) if is_a else (key.rows, rank)
    return None if rows[0] == rows[1] or columns[0] == columns[1] else part_of(tensor, rows, columns)
