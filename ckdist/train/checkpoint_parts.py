"""The training state in a checkpoint: weights and the optimizer's state, in one file of each rank.

Numbers are float32, or bfloat16 if the trained weights are.

A part is a range of a block of a tensor. Together, the parts of all ranks are the whole tensors, so a checkpoint can be
read on any mesh. A rank's table names its parts.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.regular_file import write_synced
from ckdist.train.arena import NARROW, WIDE, widened
from ckdist.weights.json_file import read_json_object
from ckdist.weights.safetensors import read_safetensors
from ckdist.weights.safetensors_writer import TensorToWrite, write_safetensors

PARTS = "training"  # the folder of the files
TYPES = {WIDE: "F32", NARROW: "BF16"}
DTYPES = {name: dtype for dtype, name in TYPES.items()}
Span = tuple[int, int]


class Part(NamedTuple):
    """Elements [begin, begin + len(values)) of the block `spans` of a tensor, in row-major order."""

    tensor: str
    shape: tuple[int, ...]  # of the whole tensor
    spans: tuple[Span, ...]
    begin: int
    values: np.ndarray  # float32 or bfloat16 (elements,)


def write_parts(folder: Path, rank: int, parts: Sequence[Part]) -> dict[str, str]:
    """Writes and syncs a rank's part of the checkpoint in `folder`. Returns the checksums of two files.

    Raises OSError.
    """
    file, table = f"{PARTS}/rank-{rank}.safetensors", f"{PARTS}/rank-{rank}.json"
    tensors = [
        TensorToWrite(part.tensor, TYPES[part.values.dtype], part.values.shape, lambda part=part: part.values)
        for part in parts
    ]
    places = {part.tensor: [part.shape, part.spans, part.begin] for part in parts}
    return {
        file: write_safetensors(folder / file, tensors),
        table: write_synced(folder / table, json.dumps(places).encode()),
    }


class SavedTensors:
    """The whole tensors of a checkpoint. Raises ModelFileError if its files do not fit together.

    Attributes:
        shapes: The shape of each tensor. Names are "weights.NAME", or the optimizer's state before the dot.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.path = checkpoint
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, list[Part]] = defaultdict(list)
        for table in sorted((checkpoint / PARTS).glob("rank-*.json")):
            path = table.with_suffix(".safetensors")
            stored, mapped = read_safetensors(path), np.memmap(path, np.uint8, "r")
            for name, place in read_json_object(table).items():
                if name not in stored or stored[name].dtype not in DTYPES:
                    raise self._damaged(name)
                tensor = stored[name]
                values = mapped[tensor.offset : tensor.offset + tensor.nbytes].view(DTYPES[tensor.dtype])
                self._add(name, place, values)

    def _damaged(self, name: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is corrupt: its parts of {name} do not fit together")

    def _add(self, name: str, place: Any, values: np.ndarray) -> None:
        try:
            shape, spans, begin = place
            part = Part(name, tuple(map(int, shape)), tuple((int(b), int(e)) for b, e in spans), int(begin), values)
        except (TypeError, ValueError):
            raise self._damaged(name) from None
        is_inside = all(0 <= b <= e <= size for (b, e), size in zip(part.spans, part.shape, strict=False))
        elements = math.prod(e - b for b, e in part.spans)
        if len(part.spans) != len(part.shape) or not is_inside or not 0 <= part.begin <= elements - values.size:
            raise self._damaged(name)
        if self.shapes.setdefault(name, part.shape) != part.shape:
            raise self._damaged(name)
        self._parts[name].append(part)

    def __call__(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the float32 tensor `name`. Raises ModelFileError if there is no such tensor of this shape."""
        if self.shapes.get(name) != shape:
            raise ModelFileError(
                f"{self.path}: {name} is {self.shapes.get(name, 'not there')}, and the model of this configuration has "
                f"{shape}: set the same model as before, or another output_dir"
            )
        parts = self._parts[name]
        if sum(part.values.size for part in parts) < math.prod(shape):
            raise self._damaged(name)
        whole = np.empty(shape, np.float32)
        for part in parts:
            block = whole[tuple(slice(*span) for span in part.spans)]
            flat = np.ascontiguousarray(block).reshape(-1)
            flat[part.begin : part.begin + part.values.size] = widened(part.values)
            block[...] = flat.reshape(block.shape)
        return whole
