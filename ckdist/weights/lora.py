"""LoRA's matrices in PEFT's format: adapter_config.json and adapter_model.safetensors."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckdist.errors import ConfigError, ModelFileError
from ckdist.weights.checkpoint import SAFETENSORS_TYPES, TensorSource
from ckdist.weights.dequantize import read_tensor
from ckdist.weights.json_file import read_json_object
from ckdist.weights.safetensors import StoredTensor, read_safetensors

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
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
