"""LoRA (Hu et al. 2021, arXiv:2106.09685): the base stays as it is, low-rank matrices beside chosen linear layers are trained.

The forward is the model's own, traced with linears that add the low-rank path, so the base may have any type that multiplies.
Adapters are read and written in PEFT's format.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckdist.errors import ConfigError, ModelFileError
from ckdist.layout import Dim
from ckdist.program.program import Weight
from ckdist.program.tracer import TrainingTracer
from ckdist.train.checkpoint import write_synced
from ckdist.train.initial import generator_of
from ckdist.weights.checkpoint import SAFETENSORS_TYPES, TensorSource
from ckdist.weights.json_file import read_json_object
from ckdist.weights.loader import read_tensor
from ckdist.weights.safetensors import StoredTensor, read_safetensors
from ckdist.weights.safetensors_writer import TensorToWrite, write_safetensors

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Lora:
    """`targets` are the last names of the linear layers that get matrices; what they add is scaled by alpha / rank."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def __post_init__(self):
        unknown = [name for name in self.targets if name not in MODULES]
        if unknown or not self.targets:
            raise ConfigError(f"lora_target_modules ({', '.join(self.targets) or 'none'}) must be some of {', '.join(MODULES)}")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def initial(self, name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
        """A: uniform within 1 / sqrt(inputs), as PEFT; B: zeros, so that training starts from the base."""
        if ".lora_B." in name:
            return np.zeros(shape, np.float32)
        bound = shape[1] ** -0.5
        return generator_of(name, seed).uniform(-bound, bound, shape).astype(np.float32)


class LoraTracer(TrainingTracer):
    """Traces w x + scale * B (A x) where the forward says w x of a target."""

    def __init__(self, lora: Lora, spec, layout, mesh):
        super().__init__(spec, layout, mesh)
        self.lora = lora

    def linear(self, x, *weights, bias=(), names=None):
        outputs = super().linear(x, *weights, bias=bias, names=names)
        outputs = list(outputs) if len(weights) > 1 else [outputs]
        rank = Dim("lora", self.lora.rank)
        for index, w in enumerate(weights):
            stem = w.name.removesuffix(".weight")
            if stem.rpartition(".")[2] in self.lora.targets:
                a, b = Weight(f"{stem}.lora_A.weight", (rank, w.dims[1])), Weight(f"{stem}.lora_B.weight", (w.dims[0], rank))
                low = self.scale(super().linear(x, a, names=["lora_a"]), self.lora.scale)  # (tokens, rank)
                outputs[index] = self.add(outputs[index], super().linear(low, b, names=["lora_b"]))
        return tuple(outputs) if len(weights) > 1 else outputs[0]


def save_adapter(folder: Path, lora: Lora, base: str, parameters: dict[str, np.ndarray]) -> None:
    """adapter_config.json and adapter_model.safetensors as PEFT reads them; `parameters` by their names in the program."""
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
    tensors = [TensorToWrite(_PREFIX + name, "F32", array.shape, lambda array=array: array) for name, array in parameters.items()]
    write_safetensors(folder / f"{WEIGHTS}.tmp", tensors, {"format": "pt"})
    (folder / f"{WEIGHTS}.tmp").replace(folder / WEIGHTS)
    write_synced(folder / f"{CONFIG}.tmp", (json.dumps(config, indent=2) + "\n").encode())
    (folder / f"{CONFIG}.tmp").replace(folder / CONFIG)


def load_adapter(folder: Path) -> tuple[Lora, dict[str, np.ndarray]]:
    """An adapter in PEFT's format: float32 by names as in the program. ModelFileError for what is missing or not supported."""
    config = read_json_object(folder / CONFIG)
    for name, plain in (("peft_type", "LORA"), ("bias", "none"), ("fan_in_fan_out", False), ("use_rslora", False), ("use_dora", False)):
        if config.get(name, plain) != plain:
            raise ModelFileError(f"{folder / CONFIG}: {name} is {config[name]!r:.60}; only {plain!r} is supported")
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, (int, float)) or not isinstance(targets, list):
        raise ModelFileError(f"{folder / CONFIG} must have r, lora_alpha and a list of target_modules")
    stored = read_safetensors(folder / WEIGHTS)
    sources = {name.removeprefix(_PREFIX).replace(".default.", "."): tensor for name, tensor in stored.items()}
    bad = [name for name in sources if not name.endswith((".lora_A.weight", ".lora_B.weight"))]
    if bad:
        raise ModelFileError(f"{folder / WEIGHTS}: tensor {bad[0]!r:.120} is not one of LoRA's matrices")
    return Lora(rank, float(alpha), tuple(targets)), {name: _read(tensor) for name, tensor in sources.items()}


def _read(tensor: StoredTensor) -> np.ndarray:
    if tensor.dtype not in SAFETENSORS_TYPES:
        raise ModelFileError(f"{tensor.file}: tensor {tensor.name!r:.120} has dtype {tensor.dtype}; the known ones are {', '.join(SAFETENSORS_TYPES)}")
    return read_tensor(TensorSource(tensor.name, SAFETENSORS_TYPES[tensor.dtype].number, tensor.shape, tensor.file, tensor.offset))
