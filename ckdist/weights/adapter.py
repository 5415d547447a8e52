"""LoRA's matrices (Hu et al. 2021, arXiv:2106.09685) in PEFT's format, adapter_config.json and
adapter_model.safetensors, and as a step multiplies with them: packed in float32, in this process's memory.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckdist.errors import ConfigError, ModelFileError
from ckdist.models.blocks.moe import is_of_mixture
from ckdist.native import check, ffi, lib
from ckdist.program.program import Program
from ckdist.program.tracer import LowRank
from ckdist.weights.checkpoint import SAFETENSORS_TYPES, TensorSource
from ckdist.weights.dequantize import read_tensor
from ckdist.weights.dtypes import F32
from ckdist.weights.json_file import read_json_object
from ckdist.weights.safetensors import StoredTensor, read_safetensors
from ckdist.weights.safetensors_writer import TensorToWrite, write_safetensors

LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", *LATENT)
CACHE_LINE = 64
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Fields of adapter_config.json that change what an adapter means, and the value with which it means what is computed
# here.
_PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
_NOTHING = (None, [], {}, False, "none")


@dataclass(frozen=True)
class Lora:
    """`targets` are the last names of the linear layers that get matrices; what they add is scaled by alpha / rank."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        unknown = [name for name in self.targets if name not in MODULES]
        if unknown or not self.targets:
            raise ConfigError(
                f"lora_target_modules ({', '.join(self.targets) or 'none'}) must be some of {', '.join(MODULES)}"
            )

    @property
    def scale(self) -> float:
        """What the product of the matrices is multiplied by."""
        return self.alpha / self.rank

    def low_rank(self) -> LowRank:
        """What is added to every linear layer of these last names, but to no expert's: serving computes all experts of
        a layer in one step, which has no place for it.
        """
        has = lambda stem: stem.rpartition(".")[2] in self.targets and not is_of_mixture(stem)
        return LowRank(lambda stem: self.rank if has(stem) else 0, self.scale)


def load_adapter(folder: Path) -> tuple[Lora, dict[str, np.ndarray]]:
    """An adapter: float32 matrices by the model's names, as model.layers.0.self_attn.q_proj.lora_A.weight, in pairs of
    (rank, in) and (out, rank).

    ModelFileError for what is missing, does not belong together or is not supported.
    """
    file = folder / CONFIG
    config = read_json_object(file)
    for name, plain in _PLAIN.items():
        value = config.get(name, plain)
        if value != plain and not (plain in _NOTHING and value in _NOTHING):
            raise ModelFileError(f"{file}: {name} is {value!r:.60}; only {plain!r} is supported")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    alpha = alpha if isinstance(alpha, (int, float)) and not isinstance(alpha, bool) else math.nan
    if type(rank) is not int or rank < 1 or not math.isfinite(alpha):
        raise ModelFileError(f"{file} must have r, a whole number, and lora_alpha, a finite number")
    sources = {
        name.removeprefix(PREFIX).replace(".default.", "."): tensor
        for name, tensor in read_safetensors(folder / WEIGHTS).items()
    }
    targets = set()
    for name, tensor in sources.items():
        stem, _, kind = name.removesuffix(".weight").rpartition(".")
        module = stem.rpartition(".")[2]
        if kind not in ("lora_A", "lora_B") or module not in MODULES:
            raise ModelFileError(
                f"{folder / WEIGHTS}: tensor {name!r:.120} is not a matrix of LoRA on one of {', '.join(MODULES)}"
            )
        if len(tensor.shape) != 2 or tensor.shape[kind == "lora_B"] != rank:
            raise ModelFileError(
                f"{folder / WEIGHTS}: {name} has shape {list(tensor.shape)}, and r is {rank} in {CONFIG}"
            )
        other = f"{stem}.lora_{'B' if kind == 'lora_A' else 'A'}.weight"
        if other not in sources:
            raise ModelFileError(f"{folder / WEIGHTS} has {name}, but not {other}")
        targets.add(module)
    if not sources:
        raise ModelFileError(f"{folder / WEIGHTS} holds no matrix")
    return Lora(rank, float(alpha), tuple(sorted(targets))), {name: _read(tensor) for name, tensor in sources.items()}


def _read(tensor: StoredTensor) -> np.ndarray:
    if tensor.dtype not in SAFETENSORS_TYPES:
        raise ModelFileError(
            f"{tensor.file}: tensor {tensor.name!r:.120} has dtype {tensor.dtype}; "
            f"the known ones are {', '.join(SAFETENSORS_TYPES)}"
        )
    return read_tensor(
        TensorSource(tensor.name, SAFETENSORS_TYPES[tensor.dtype].number, tensor.shape, tensor.file, tensor.offset)
    )


class PackedMatrix:
    """float32 (rows, cols) as tiles; what stands for a loader's MatrixHandle."""

    type = F32.number

    def __init__(self, values: np.ndarray):
        self.rows, self.cols = values.shape
        tile_bytes = lib.ckdist_tile_bytes(ffi.NULL, self.type, self.cols)
        self.bytes = -(-self.rows // 16) * tile_bytes
        self._memory = np.zeros(self.bytes + CACHE_LINE, np.uint8)
        shift = -self._memory.ctypes.data % CACHE_LINE
        tiles, source = self._memory[shift : shift + self.bytes], np.ascontiguousarray(values, np.float32)
        address = ffi.cast("uint8_t *", tiles.ctypes.data)
        check(
            lib.ckdist_pack(
                ffi.NULL,
                self.type,
                self.rows,
                self.cols,
                ffi.cast("uint8_t *", source.ctypes.data),
                source.nbytes,
                address,
                self.bytes,
            )
        )
        self._struct = ffi.new(
            "struct ckdist_matrix *",
            {"type": self.type, "rows": self.rows, "cols": self.cols, "tile_bytes": tile_bytes, "tiles": address},
        )

    @property
    def address(self) -> int:
        """Of the native `struct ckdist_matrix`."""
        return int(ffi.cast("intptr_t", self._struct))


class Adapter:
    """The adapter in `folder`.

    `low_rank` is what it adds to which linear layers.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        lora, self._tensors = load_adapter(folder)
        ranks = {
            name.removesuffix(".lora_A.weight"): lora.rank for name in self._tensors if name.endswith(".lora_A.weight")
        }
        self.low_rank = LowRank(lambda stem: ranks.get(stem, 0), lora.scale)
        self._packed: dict[tuple[str, tuple[int, int], tuple[int, int]], PackedMatrix] = {}

    def check(self, program: Program) -> None:
        """ModelFileError unless `program` has all of the adapter's layers, in its sizes."""
        dims = {w.name: tuple(d.elements for d in w.dims) for w in program.weights}
        for name, tensor in self._tensors.items():
            if is_of_mixture(name):
                raise ModelFileError(
                    f"{self.folder} has {name}, and experts cannot have matrices of LoRA: train one without"
                )
            if name not in dims:
                raise ModelFileError(
                    f"{self.folder} has {name}, and the model has no such layer: it was trained on another model"
                )
            if tensor.shape != dims[name]:
                raise ModelFileError(
                    f"{self.folder}: {name} has shape {list(tensor.shape)}, and the model needs {list(dims[name])}: "
                    "it was trained on another model"
                )

    def matrix(self, name: str, rows: tuple[int, int], columns: tuple[int, int]) -> PackedMatrix:
        """Rows and columns [begin, end) of a matrix, with zeros where these go beyond it; B is times the scale.

        The same part is packed once.
        """
        key = name, rows, columns
        if key not in self._packed:
            part = self._tensors[name][slice(*rows), slice(*columns)]
            if ".lora_B." in name:
                part = part * np.float32(self.low_rank.scale)
            missing = [(0, end - begin - n) for (begin, end), n in zip((rows, columns), part.shape, strict=True)]
            self._packed[key] = PackedMatrix(np.pad(part, missing))
        return self._packed[key]

    @property
    def bytes(self) -> int:
        """Of what was packed."""
        return sum(matrix.bytes for matrix in self._packed.values())


def save_adapter(folder: Path, lora: Lora, base: str, parameters: Mapping[str, np.ndarray]) -> None:
    """adapter_config.json and adapter_model.safetensors as PEFT reads them; `parameters` by their names in the
    program.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }
    tensors = [
        TensorToWrite(PREFIX + name, "F32", array.shape, lambda array=array: array)
        for name, array in parameters.items()
    ]
    write_safetensors(folder / f"{WEIGHTS}.tmp", tensors, {"format": "pt"})
    (folder / f"{WEIGHTS}.tmp").replace(folder / WEIGHTS)
    with open(folder / f"{CONFIG}.tmp", "wb") as file:
        file.write((json.dumps(config, indent=2) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())
    (folder / f"{CONFIG}.tmp").replace(folder / CONFIG)


def is_low_rank(name: str) -> bool:
    """Whether a lowered program's matrix is an adapter's and not the model's."""
    return ".lora_" in name
