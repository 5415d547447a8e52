"""LoRA's matrices (Hu et al. 2021, arXiv:2106.09685) in PEFT's format, adapter_config.json and
adapter_model.safetensors.

Experts' matrices come in two forms. Of models whose experts are linears each by itself: A and B by the expert's number.
Of models whose experts are stacks (`target_parameters`): one A, the experts' below one another, and one B, whose
columns are by rank and then by expert; gate and up are one matrix, and have one A.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckdist.errors import ConfigError, ModelFileError
from ckdist.models.blocks.moe import is_expert, is_of_mixture
from ckdist.models.families.family import TensorNames, stack_of
from ckdist.models.registry import family
from ckdist.models.spec import ModelSpec, MoeFfn
from ckdist.program.tracer import LowRank
from ckdist.weights.checkpoint import SAFETENSORS_TYPES
from ckdist.weights.dequantize import read_tensor
from ckdist.weights.json_file import read_json_object
from ckdist.weights.safetensors import StoredTensor, read_safetensors
from ckdist.weights.safetensors_writer import TensorToWrite, write_safetensors
from ckdist.weights.tensor_source import TensorSource

LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", *FEED_FORWARD, *LATENT)
FUSED = ("gate_up_proj", "down_proj")  # parameters of stacked experts
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
}
_NOTHING = (None, [], {}, False, "none")
Matrices = dict[str, np.ndarray]


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
        """What is added to every linear layer of these last names, each expert's too."""
        return LowRank(lambda stem: self.rank if stem.rpartition(".")[2] in self.targets else 0, self.scale)


def load_adapter(folder: Path, spec: ModelSpec) -> tuple[Lora, Matrices]:
    """An adapter of a model: float32 matrices by the model's names, as model.layers.0.self_attn.q_proj.lora_A.weight,
    in pairs of (rank, in) and (out, rank), of experts in stacks of these.

    ModelFileError for what is missing, does not belong together or is not supported.
    """
    return _AdapterReader(folder, spec).read()


class _AdapterReader:
    """One adapter, while it is read."""

    def __init__(self, folder: Path, spec: ModelSpec):
        self.file, self.config = folder / WEIGHTS, read_json_object(folder / CONFIG)
        self.names, self.hidden = family(spec.family).safetensors, spec.hidden_size
        self.mixtures = {
            f"model.layers.{i}.mlp.experts": layer.ffn
            for i, layer in enumerate(spec.layers)
            if isinstance(layer.ffn, MoeFfn)
        }
        self._check_config(folder / CONFIG)
        self.rank, self.alpha = self.config["r"], float(self.config["lora_alpha"])
        self.found: Matrices = {}

    def _check_config(self, file: Path) -> None:
        for name, plain in _PLAIN.items():
            value = self.config.get(name, plain)
            if value != plain and not (plain in _NOTHING and value in _NOTHING):
                raise ModelFileError(f"{file}: {name} is {value!r:.60}; only {plain!r} is supported")
        for name in ("rank_pattern", "alpha_pattern"):
            patterns = self.config.get(name) or {}
            known = [key for one in FUSED for key in (one, rf".*\.{one}")]
            if not isinstance(patterns, dict) or any(key not in known for key in patterns):
                raise ModelFileError(
                    f"{file}: {name} is {patterns!r:.60}; only {' and '.join(FUSED)} may have their own"
                )
            whole = name == "rank_pattern"
            if not all(_is_positive(value) and (not whole or type(value) is int) for value in patterns.values()):
                raise ModelFileError(f"{file}: {name} is {patterns!r:.60}; it must have positive numbers")
        rank, alpha = self.config.get("r"), self.config.get("lora_alpha")
        alpha = alpha if isinstance(alpha, (int, float)) and not isinstance(alpha, bool) else math.nan
        if type(rank) is not int or rank < 1 or not math.isfinite(alpha):
            raise ModelFileError(f"{file} must have r, a whole number, and lora_alpha, a finite number")

    def read(self) -> tuple[Lora, Matrices]:
        """See `load_adapter`."""
        sources = {
            name.removeprefix(PREFIX).replace(".default.", "."): tensor
            for name, tensor in read_safetensors(self.file).items()
        }
        if not sources:
            raise ModelFileError(f"{self.file} holds no matrix")
        for name, tensor in sources.items():
            stem, _, kind = name.removesuffix(".weight").rpartition(".")
            if kind not in ("lora_A", "lora_B"):
                raise self._unknown(name)
            other = f"{stem}.lora_{'B' if kind == 'lora_A' else 'A'}.weight"
            if other not in sources:
                raise ModelFileError(f"{self.file} has {name}, but not {other}")
            if kind == "lora_A":
                self._add(stem, tensor, sources[other], f"{stem}.base_layer.{kind}.weight" in sources)
        targets = {name.split(".")[-3] for name in self.found}
        return Lora(self.rank, self.alpha, tuple(sorted(targets))), self.found

    def _unknown(self, name: str) -> ModelFileError:
        return ModelFileError(
            f"{self.file}: tensor {name!r:.120} is not a matrix of LoRA on one of {', '.join(MODULES)}"
        )

    def _add(self, stem: str, a: StoredTensor, b: StoredTensor, is_outer: bool) -> None:
        """A and B of one linear, of one expert's or of all experts of a layer."""
        experts = stem.removesuffix(".base_layer")
        if experts in self.mixtures:
            self._add_fused(experts, self._parameter(stem, is_outer or experts != stem, experts != stem), a, b)
            return
        stack, index = stack_of(f"{stem}.weight")
        weights = self.names.weights_of(stack)
        stem = weights[0].removesuffix(".weight") if len(weights) == 1 else ""
        if stem.rpartition(".")[2] not in MODULES or (index is not None) != is_expert(stem):
            raise self._unknown(a.name)
        for tensor, rank in ((a, a.shape[0] if a.shape else 0), (b, b.shape[-1] if b.shape else 0)):
            if len(tensor.shape) != 2 or rank != self.rank:
                raise ModelFileError(
                    f"{self.file}: {tensor.name} has shape {list(tensor.shape)}, and r is {self.rank} in {CONFIG}"
                )
        for kind, tensor in (("A", a), ("B", b)):
            name, values = f"{stem}.lora_{kind}.weight", _read(tensor)
            if index is None:
                self.found[name] = values
            else:
                self._put(name, index, values)

    def _put(self, name: str, index: int, values: np.ndarray) -> None:
        """An expert's matrix into its stack, which begins with zeros."""
        ffn = self.mixtures.get(name.partition(".experts.")[0] + ".experts")
        if ffn is None or index >= ffn.num_experts:
            has = f"{ffn.num_experts} experts" if ffn else "none"
            raise ModelFileError(f"{self.file} has a matrix of expert {index} of {name}, and the layer has {has}")
        sizes = self.hidden, ffn.intermediate_size
        sides = sizes[::-1] if ".down_proj." in name else sizes  # of the matrix, its columns and its rows
        needed = (self.rank, sides[0]) if ".lora_A." in name else (sides[1], self.rank)
        if values.shape != needed:
            raise ModelFileError(
                f"{self.file}: expert {index} of {name} has shape {list(values.shape)}, and the model needs "
                f"{list(needed)}: it was trained on another model"
            )
        self.found.setdefault(name, np.zeros((ffn.num_experts, *needed), np.float32))[index] = values

    def _parameter(self, stem: str, is_nested: bool, is_inner: bool) -> str:
        """Which parameter matrices at `experts` are of: gate_up_proj is inside of down_proj where both have some."""
        if is_nested:
            return FUSED[0 if is_inner else 1]
        targets = self.config.get("target_parameters")
        named = {str(name).rpartition(".")[2] for name in targets} if isinstance(targets, list) else set()
        if len(named & set(FUSED)) != 1:
            raise ModelFileError(
                f"{self.file} has matrices of {stem}, and target_parameters in {CONFIG} is {targets!r:.60}: "
                f"it must name {' or '.join(FUSED)}"
            )
        return (named & set(FUSED)).pop()

    def _add_fused(self, experts: str, which: str, a: StoredTensor, b: StoredTensor) -> None:
        """A (experts * rank, in) and B (out, rank * experts) of one parameter of a layer's stack."""
        count = self.mixtures[experts].num_experts
        of = lambda name, default: next(
            (v for key, v in (self.config.get(name) or {}).items() if key.endswith(which)), default
        )
        rank, alpha = of("rank_pattern", self.rank), of("alpha_pattern", self.alpha)
        if len(a.shape) != 2 or len(b.shape) != 2 or (a.shape[0], b.shape[1]) != (rank * count,) * 2:
            raise ModelFileError(
                f"{self.file}: {a.name} and {b.name} have shapes {list(a.shape)} and {list(b.shape)}; "
                f"r is {rank}, and the layer has {count} experts"
            )
        low = _read(a).reshape(count, rank, -1)
        values = np.ascontiguousarray(_read(b).reshape(-1, rank, count).transpose(2, 0, 1))  # (experts, out, rank)
        values *= np.float32((alpha / rank) / (self.alpha / self.rank))
        parts = {which: values}
        if which == FUSED[0]:
            half = values.shape[1] // 2
            by_turns = self.names.is_alternating(f"{experts}.{which}.weight")
            gate, up = (values[:, 0::2], values[:, 1::2]) if by_turns else (values[:, :half], values[:, half:])
            parts = {"gate_proj": gate, "up_proj": up}
        for name, part in parts.items():
            self.found[f"{experts}.{name}.lora_A.weight"] = low
            self.found[f"{experts}.{name}.lora_B.weight"] = np.ascontiguousarray(part)


def _is_positive(value: Any) -> bool:
    """Whether a field is a number that a rank or an alpha can be."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _read(tensor: StoredTensor) -> np.ndarray:
    if tensor.dtype not in SAFETENSORS_TYPES:
        raise ModelFileError(
            f"{tensor.file}: tensor {tensor.name!r:.120} has dtype {tensor.dtype}; "
            f"the known ones are {', '.join(SAFETENSORS_TYPES)}"
        )
    return read_tensor(
        TensorSource(tensor.name, SAFETENSORS_TYPES[tensor.dtype].number, tensor.shape, tensor.file, tensor.offset)
    )


def save_adapter(folder: Path, lora: Lora, base: str, parameters: Mapping[str, np.ndarray], spec: ModelSpec) -> None:
    """adapter_config.json and adapter_model.safetensors as PEFT reads them; `parameters` by their names in the
    program.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = family(spec.family).safetensors
    is_fused = bool(names.alternating) and any(is_expert(name) for name in parameters)
    written = dict(_fused(lora, parameters) if is_fused else _by_expert(names, parameters))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({name.split(".")[-3] for name in written} - {"experts", "base_layer"}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }
    if is_fused:
        has = {FUSED[part == "down_proj"] for part in lora.targets if part in FEED_FORWARD}
        twice = {rf".*\.{FUSED[0]}": 2} if FUSED[0] in has else {}  # ranks, those of gate and of up
        config |= {
            "target_parameters": [f"mlp.experts.{name}" for name in FUSED if name in has],
            "rank_pattern": {key: factor * lora.rank for key, factor in twice.items()},
            "alpha_pattern": {key: factor * lora.alpha for key, factor in twice.items()},
        }
    tensors = [
        TensorToWrite(PREFIX + name, "F32", array.shape, lambda array=array: array) for name, array in written.items()
    ]
    write_safetensors(folder / f"{WEIGHTS}.tmp", tensors, {"format": "pt"})
    (folder / f"{WEIGHTS}.tmp").replace(folder / WEIGHTS)
    with open(folder / f"{CONFIG}.tmp", "wb") as file:
        file.write((json.dumps(config, indent=2) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())
    (folder / f"{CONFIG}.tmp").replace(folder / CONFIG)


def _by_expert(names: TensorNames, parameters: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Matrices by PEFT's names where each expert is a linear, or several, by itself."""
    for name, array in parameters.items():
        stem, _, kind = name.removesuffix(".weight").rpartition(".")
        if is_expert(name):
            for index, matrix in enumerate(array):
                stored = names.stored_matrix(f"{stem}.weight", index).removesuffix(".weight")
                yield f"{stored}.{kind}.weight", matrix
        elif is_of_mixture(name):
            (stored,) = names.stored([f"{stem}.weight"])
            yield f"{stored.removesuffix('.weight')}.{kind}.weight", array
        else:
            yield name, array


def _fused(lora: Lora, parameters: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """The same where experts are stacks whose gate and up are by turns the rows of one: it has A of both below one
    another, and B of each where the other has zeros.
    """
    yield from ((name, array) for name, array in parameters.items() if not is_expert(name))
    stems = dict.fromkeys(name.rpartition(".lora_")[0] for name in parameters if is_expert(name))
    pairs = {stem: [parameters[f"{stem}.lora_{kind}.weight"] for kind in "AB"] for stem in stems}
    for experts in dict.fromkeys(stem.rpartition(".")[0] for stem in stems):
        both = [pairs.get(f"{experts}.{part}_proj") for part in ("gate", "up")]
        has_up, down = any(both), pairs.get(f"{experts}.down_proj")
        if down:
            yield from _flat(experts, *down)
        if has_up:
            a, b = next(pair for pair in both if pair)
            low = np.concatenate([pair[0] if pair else np.zeros_like(a) for pair in both], axis=1)
            values = np.zeros((len(b), 2 * b.shape[1], 2 * lora.rank), np.float32)
            for at, pair in enumerate(both):
                if pair:
                    values[:, at::2, at * lora.rank : (at + 1) * lora.rank] = pair[1]
            yield from _flat(f"{experts}.base_layer" if down else experts, low, values)


def _flat(stem: str, a: np.ndarray, b: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """A and B of all experts as two matrices."""
    yield f"{stem}.lora_A.weight", a.reshape(-1, a.shape[2])
    yield f"{stem}.lora_B.weight", np.ascontiguousarray(b.transpose(1, 2, 0)).reshape(b.shape[1], -1)
