"""LoRA matrices (Hu et al. 2021, arXiv:2106.09685) in PEFT's format: adapter_config.json, adapter_model.safetensors.

Matrices of experts have two forms:

- If each expert is a linear by itself: A and B for each expert number.
- If experts are stacks (`target_parameters`): one A with the rows of all experts in order, and one B with columns
  ordered by rank, then by expert. gate and up are one matrix with one A.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ckdist.errors import ConfigError, ModelFileError
from ckdist.models.decoder import SCORE, weight_shapes
from ckdist.models.families.family import TensorNames, stack_of
from ckdist.models.moe_weights import is_expert, is_of_mixture
from ckdist.models.registry import family
from ckdist.models.spec import ModelSpec, MoeFfn
from ckdist.program.tracer import LowRank
from ckdist.regular_file import write_synced
from ckdist.weights.adapter_config import CONFIG, MERGE, AdapterConfig
from ckdist.weights.dequantize import read_tensor
from ckdist.weights.safetensors import read_safetensors
from ckdist.weights.safetensors_writer import TensorToWrite, write_safetensors
from ckdist.weights.stored_weights import KNOWN_TYPES, heads_of, weights_of
from ckdist.weights.tensor_source import StoredTensor

LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", *FEED_FORWARD, *LATENT)
FUSED = ("gate_up_proj", "down_proj")  # parameters of stacked experts
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
MAGNITUDE = ".lora_magnitude_vector"  # after the name of a linear
ANOTHER_MODEL = "it was trained on another model"
HALVES = {"F16", "BF16"}  # types of the file whose matrices are kept as float16
HALF_RANGE = (2.0**-12, 2.0**15)  # of the largest value, for errors of at most 2^-13 of it
Matrices = dict[str, np.ndarray]


@dataclass(frozen=True)
class Lora:
    """The settings of a new adapter. The product of its matrices is scaled by alpha / rank.

    `rank_stabilized`: by alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023, arXiv:2312.03732).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]  # last parts of the names of linear layers, as q_proj
    rank_stabilized: bool = False
    dropout: float = 0.0
    has_magnitudes: bool = False  # DoRA

    def __post_init__(self) -> None:
        unknown = [name for name in self.targets if name not in MODULES]
        if unknown or not self.targets:
            raise ConfigError(
                f"lora_target_modules ({', '.join(self.targets) or 'none'}) must be some of {', '.join(MODULES)}"
            )

    @property
    def scale(self) -> float:
        """The factor on B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def low_rank(self) -> LowRank:
        """The ranks of all linear layers, in experts too, whose names end in one of `targets`."""
        rank = lambda stem: self.rank if stem.rpartition(".")[2] in self.targets else 0
        return LowRank(rank, self.scale, self.dropout, self.has_magnitudes)


@dataclass(frozen=True)
class StoredAdapter:
    """The matrices of an adapter: a linear becomes W x + scale * B (A x).

    Attributes:
        matrices: A (rank, in) and B (out, rank) by the model's names, as
            model.layers.0.self_attn.q_proj.lora_A.weight. Stacks of these for experts. float32, or float16 if the
            file has 16 bits and it is no stack. With magnitudes (DoRA), also these (out,), float32.
        notes: Warnings for the user, one line each.
        scales: alpha / rank by A's name. It is empty if B includes the scale. B of experts always does.
        head: The head of a reward model, (1, hidden).
    """

    matrices: Matrices
    notes: tuple[str, ...]
    scales: dict[str, float] = field(default_factory=dict[str, float])
    head: StoredTensor | None = None


def files_of(path: Path) -> tuple[Path, ...]:
    """The files of an adapter: a GGUF file, or two in PEFT's folder. The last one has the matrices."""
    return (path,) if path.is_file() else (path / CONFIG, path / WEIGHTS)


def load_adapter(folder: Path, spec: ModelSpec, scaled: bool = True, merging: bool = False) -> StoredAdapter:
    """Reads an adapter of a model, from PEFT's folder or a GGUF file.

    Args:
        scaled: B includes the scale. If not, `StoredAdapter.scales` has it.
        merging: Magnitudes (DoRA) are read. Default: they are refused.

    Raises:
        ModelFileError: A file or a matrix is missing, does not fit the model, or is not supported.
    """
    if folder.is_file():
        from ckdist.weights.adapter_gguf import read_gguf_adapter  # it imports this module

        return read_gguf_adapter(folder, spec, scaled)
    return _AdapterReader(folder, spec, scaled, merging).read()


class _AdapterReader:
    """The state of reading one adapter."""

    def __init__(self, folder: Path, spec: ModelSpec, scaled: bool, merging: bool):
        self.scaled, self.scales = scaled, dict[str, float]()
        self.file, self.config = folder / WEIGHTS, AdapterConfig(folder, merging)
        self.spec, self.names, self.shapes = spec, family(spec.family).safetensors, weight_shapes(spec)
        self.mixtures = {
            f"model.layers.{i}.mlp.experts": layer.ffn
            for i, layer in enumerate(spec.layers)
            if isinstance(layer.ffn, MoeFfn)
        }
        self.found: Matrices = {}
        self.stacks: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {}  # A and B of each expert

    def read(self) -> StoredAdapter:
        """Reads all matrices, as `load_adapter` describes."""
        sources = {
            name.removeprefix(PREFIX).replace(".default.", "."): tensor
            for name, tensor in read_safetensors(self.file).items()
        }
        if not sources:
            raise ModelFileError(f"{self.file} holds no matrix")
        for name, tensor in sources.items():
            stem, _, kind = name.removesuffix(".weight").rpartition(".")
            if f".{kind}" == MAGNITUDE and self.config.fields.get("use_dora"):
                continue  # `_add` reads it
            if name == SCORE and self.config.has_head:
                continue  # `_head` reads it
            if kind not in ("lora_A", "lora_B"):
                raise self._unknown(name)
            other = f"{stem}.lora_{'B' if kind == 'lora_A' else 'A'}.weight"
            if other not in sources:
                raise ModelFileError(f"{self.file} has {name}, but not {other}")
            if kind == "lora_A":
                self._add(stem, tensor, sources[other], f"{stem}.base_layer.{kind}.weight" in sources)
                if self.config.fields.get("use_dora"):
                    self._add_magnitude(stem, sources.get(stem + MAGNITUDE))
        for stem, experts in self.stacks.items():
            self._stack(stem, experts)
        return StoredAdapter(self.found, self._notes(), self.scales, self._head(sources.get(SCORE)))

    def _head(self, tensor: StoredTensor | None) -> StoredTensor | None:
        if not self.config.has_head:
            return None
        needed = (1, self.spec.hidden_size)
        if tensor is None or tensor.shape != needed or tensor.type < 0:
            there = f"{tensor.dtype} {list(tensor.shape)}" if tensor else "not there"
            raise ModelFileError(f"{self.file}: {SCORE} is {there}, and a reward model has {list(needed)}: {MERGE}")
        return replace(tensor, name=SCORE)

    def _unknown(self, name: str) -> ModelFileError:
        return ModelFileError(
            f"{self.file}: tensor {name!r:.120} is not a matrix of LoRA on one of {', '.join(MODULES)}: {MERGE}"
        )

    def _add(self, stem: str, a: StoredTensor, b: StoredTensor, is_outer: bool) -> None:
        """Adds A and B of one linear, of one expert, or of all experts of a layer."""
        inner = stem.removesuffix(".base_layer")
        stacked = weights_of(self.names, f"{inner}.{FUSED[1]}.weight", self.shapes)
        experts = stacked[0].removesuffix(f".{FUSED[1]}.weight") if stacked else ""
        if experts in self.mixtures:
            which = self._parameter(inner, is_outer or inner != stem, inner != stem)
            self._add_fused(experts, f"{inner}.{which}", a, b)
            return
        stored, index = stack_of(f"{stem}.weight")
        weights = weights_of(self.names, stored, self.shapes)
        stems = [weight.removesuffix(".weight") for weight in weights]
        if not stems and stem.rpartition(".")[2] in MODULES:
            raise ModelFileError(f"{self.file} has {a.name}, and the model has no such layer: {ANOTHER_MODEL}")
        if (
            not stems
            or not all(one.rpartition(".")[2] in MODULES for one in stems)
            or self.names.has("keys_values", stored)
        ):
            raise self._unknown(a.name)
        if (index is not None) != is_expert(stems[0]) or (index is not None and len(stems) > 1):
            raise self._unknown(a.name)
        low, values = self._pair(key := self._key(stem, a), a, b, scaled=self.scaled or index is not None)
        if index is None and {a.dtype, b.dtype} <= HALVES:
            low, values = halves(low, values)
        rows = self._rows_of(stored, weights, len(values)) if index is None else [slice(None)]
        if len(rows) != len(stems):
            total = sum(self.shapes[weight][0] for weight in weights)
            raise ModelFileError(
                f"{self.file}: {b.name} has {len(values)} rows, and the model needs {total}: {ANOTHER_MODEL}"
            )
        for one, part in zip(stems, rows, strict=True):
            if index is not None:
                self._add_expert(one, index, low, values)
            else:
                self.found[f"{one}.lora_A.weight"] = low
                self.found[f"{one}.lora_B.weight"] = np.ascontiguousarray(values[part])
                if not self.scaled:
                    self.scales[f"{one}.lora_A.weight"] = self.config.scale(key)

    def _add_magnitude(self, stem: str, tensor: StoredTensor | None) -> None:
        """Adds the magnitudes of a linear. Raises ModelFileError if they are missing, or belong to experts."""
        weights = weights_of(self.names, f"{stem}.weight", self.shapes)
        if tensor is None or not weights or is_expert(weights[0]):
            reason = "has no magnitudes of" if tensor is None else "has magnitudes of experts,"
            raise ModelFileError(f"{self.file} {reason} {stem}: {MERGE}")
        values = _read(tensor).reshape(-1)
        rows = self._rows_of(f"{stem}.weight", weights, len(values))
        if len(rows) != len(weights):
            raise ModelFileError(f"{self.file}: {tensor.name} has {len(values)} numbers: {ANOTHER_MODEL}")
        for weight, part in zip(weights, rows, strict=True):
            self.found[weight.removesuffix(".weight") + MAGNITUDE] = values[part]

    def _key(self, stem: str, a: StoredTensor) -> str:
        """The name of the module or parameter that PEFT matches patterns with."""
        if self.config.is_module(stem):
            return stem
        if self.config.is_parameter(f"{stem}.weight"):
            return f"{stem}.weight"
        raise ModelFileError(
            f"{self.file} has {a.name}, and {CONFIG} puts no matrices there (target_modules, exclude_modules, "
            "layers_to_transform): one of the two files is another adapter's"
        )

    def _pair(
        self, key: str, a: StoredTensor, b: StoredTensor, experts: int = 1, scaled: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """A and B. Raises ModelFileError if their rank is not that of the configuration."""
        rank = self.config.rank(key)
        if len(a.shape) != 2 or len(b.shape) != 2 or (a.shape[0], b.shape[1]) != (rank * experts,) * 2:
            layer = f", and the layer has {experts} experts" if experts > 1 else ""
            raise ModelFileError(
                f"{self.file}: {a.name} and {b.name} have shapes {list(a.shape)} and {list(b.shape)}; "
                f"r is {rank} in {CONFIG}{layer}"
            )
        return _read(a), _read(b) * np.float32(self.config.scale(key) if scaled else 1)

    def _rows_of(self, stored: str, weights: Sequence[str], there: int) -> list[np.ndarray | slice]:
        """For each weight in a stored matrix of `there` rows: its rows. Empty if the numbers of rows do not fit."""
        counts = [self.shapes[weight][0] for weight in weights]
        if len(weights) == 1:
            return [slice(None)]  # `Adapter.check` compares the size with the program's
        if there != sum(counts):
            return []
        heads = heads_of(self.spec, weights[0]) if self.names.has("joined", stored) else 1
        rows = np.arange(there).reshape(heads, -1)
        ends = np.cumsum(counts) // heads
        return [part.ravel() for part in np.split(rows, ends[:-1].tolist(), axis=1)]

    def _add_expert(self, stem: str, index: int, low: np.ndarray, values: np.ndarray) -> None:
        count, rows, columns = self.shapes[f"{stem}.weight"]
        if index >= count:
            raise ModelFileError(
                f"{self.file} has a matrix of expert {index} of {stem}, and the layer has {count} experts"
            )
        for kind, values_there, needed in (("A", low.shape[1], columns), ("B", values.shape[0], rows)):
            if values_there != needed:
                raise ModelFileError(
                    f"{self.file}: expert {index} of {stem}.lora_{kind} has {values_there} "
                    f"{'columns' if kind == 'A' else 'rows'}, and the model needs {needed}: {ANOTHER_MODEL}"
                )
        self.stacks.setdefault(stem, {})[index] = low, values

    def _stack(self, stem: str, experts: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> None:
        """Stacks the matrices of all experts, padded with zeros to the largest rank."""
        count, rows, columns = self.shapes[f"{stem}.weight"]
        rank = max(len(low) for low, _ in experts.values())
        a, b = np.zeros((count, rank, columns), np.float32), np.zeros((count, rows, rank), np.float32)
        for index, (low, values) in experts.items():
            a[index, : len(low)] = low
            b[index, :, : len(low)] = values
        self.found[f"{stem}.lora_A.weight"], self.found[f"{stem}.lora_B.weight"] = a, b

    def _parameter(self, experts: str, is_nested: bool, is_inner: bool) -> str:
        """The parameter that matrices at `experts` belong to.

        If both parameters have matrices, PEFT nests gate_up_proj inside down_proj.
        """
        named = [name for name in FUSED if self.config.is_parameter(f"{experts}.{name}")]
        if len(named) != (2 if is_nested else 1):
            raise ModelFileError(
                f"{self.file} has matrices of {experts}, and target_parameters in {CONFIG} must name "
                f"{' and '.join(FUSED) if is_nested else f'{FUSED[0]} or {FUSED[1]}'} there"
            )
        return named[0] if is_inner else named[-1]

    def _add_fused(self, experts: str, key: str, a: StoredTensor, b: StoredTensor) -> None:
        """Adds A (experts * rank, in) and B (out, rank * experts) of one parameter of a layer's stack."""
        count, which = self.mixtures[experts].num_experts, key.rpartition(".")[2]
        low, values = self._pair(key, a, b, count)
        low = low.reshape(count, -1, low.shape[1])
        values = values.reshape(len(values), -1, count).transpose(2, 0, 1)  # (experts, out, rank)
        parts = {which: values}
        if which == FUSED[0]:
            half = values.shape[1] // 2
            is_interleaved = self.names.has("alternating", f"{experts}.{which}.weight")
            gate, up = (values[:, 0::2], values[:, 1::2]) if is_interleaved else (values[:, :half], values[:, half:])
            parts = {"gate_proj": gate, "up_proj": up}
        for name, part in parts.items():
            self.found[f"{experts}.{name}.lora_A.weight"] = low
            self.found[f"{experts}.{name}.lora_B.weight"] = np.ascontiguousarray(part)

    def _notes(self) -> tuple[str, ...]:
        """A note if the file lacks matrices for modules that the configuration targets. PEFT warns of them too."""
        missing = []
        for weight, shape in self.shapes.items():
            stem = weight.removesuffix(".weight")
            if stem.rpartition(".")[2] not in MODULES or len(shape) < 2:
                continue
            if is_expert(stem):
                experts, _, part = stem.rpartition(".")
                stored = self.names.stored_matrix(weight, 0).removesuffix(".weight")
                parameter = f"{experts}.{FUSED[part == 'down_proj']}"
                is_target = self.config.is_module(stored) or self.config.is_parameter(parameter)
                whole = f"{stem}.lora_A.weight" in self.found
                if is_target and len(self.stacks.get(stem, ())) < shape[0] and (stem in self.stacks or not whole):
                    missing.append(stem)
            elif f"{stem}.lora_A.weight" not in self.found:
                (stored,) = self.names.stored([weight])
                if self.config.is_module(stored.removesuffix(".weight")):
                    missing.append(stem)
        if not missing:
            return ()
        verb = "module has" if len(missing) == 1 else "modules have"
        note = f"{len(missing)} targeted {verb} no matrices, or not for all experts, as {missing[0]!r}"
        return (f"{note}: only the base's weights are used there",)


def halves(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A and B as float16, with the same product. A power of two gives both about the same largest value.

    The relative error of an element is at most 2^-11, or 2^-25 absolute. Unchanged if the values are not of its range.
    """
    largest_a, largest_b = (float(np.abs(matrix).max(initial=0)) for matrix in (a, b))
    least, most = HALF_RANGE
    if not least**2 <= largest_a * largest_b <= most**2:  # NaN, too
        return a, b
    factor = np.float32(2.0 ** round(math.log2(largest_b / largest_a) / 2))
    return (a * factor).astype(np.float16), (b / factor).astype(np.float16)


def _read(tensor: StoredTensor) -> np.ndarray:
    if tensor.type < 0:
        raise ModelFileError(f"{tensor.file}: tensor {tensor.name!r:.120} has dtype {tensor.dtype}; {KNOWN_TYPES}")
    return read_tensor(tensor.source)


def save_adapter(folder: Path, lora: Lora, base: str, parameters: Mapping[str, np.ndarray], spec: ModelSpec) -> None:
    """Writes adapter_config.json and adapter_model.safetensors for PEFT. `parameters` have the program's names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = family(spec.family).safetensors
    is_fused = names.uses("alternating") and any(is_expert(name) for name in parameters)
    from ckdist.weights.joined_rows import joined_adapter

    parameters, ranks = joined_adapter(names, parameters, spec)
    written = dict(_fused(lora, parameters) if is_fused else _by_expert(names, parameters))
    if has_head := SCORE in written:
        written[SCORE] = written[SCORE][:1]
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_head else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(
            {name.split(".")[-3] for name in written if ".lora_" in name} - {"experts", "base_layer"}
        ),
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": lora.rank_stabilized,
        "use_dora": lora.has_magnitudes,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": [SCORE.removesuffix(".weight")] if has_head else None,
    }
    if ranks:
        config |= _patterns(lora, ranks)
    if is_fused:
        has = {FUSED[part == "down_proj"] for part in lora.targets if part in FEED_FORWARD}
        twice = {rf".*\.{FUSED[0]}": 2} if FUSED[0] in has else {}  # the ranks of gate and up add up
        config["target_parameters"] = [f"mlp.experts.{name}" for name in FUSED if name in has]
        config |= _patterns(lora, ranks | twice)
    tensors = [
        TensorToWrite(PREFIX + name, "F32", array.shape, lambda array=array: array) for name, array in written.items()
    ]
    write_safetensors(folder / f"{WEIGHTS}.tmp", tensors, {"format": "pt"})
    (folder / f"{WEIGHTS}.tmp").replace(folder / WEIGHTS)
    write_synced(folder / f"{CONFIG}.tmp", (json.dumps(config, indent=2) + "\n").encode())
    (folder / f"{CONFIG}.tmp").replace(folder / CONFIG)


def _patterns(lora: Lora, ranks: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """The entries for linears whose rank is a multiple of the adapter's, by pattern. They have the others' scale."""
    alpha = {key: (factor**0.5 if lora.rank_stabilized else factor) * lora.alpha for key, factor in ranks.items()}
    return {"rank_pattern": {key: factor * lora.rank for key, factor in ranks.items()}, "alpha_pattern": alpha}


def _by_expert(names: TensorNames, parameters: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """The matrices by PEFT's names, for models that store each expert by itself."""
    for name, array in parameters.items():
        stem, _, kind = name.removesuffix(".weight").rpartition(".")
        if is_expert(name):
            for index, matrix in enumerate(array):
                stored = names.stored_matrix(f"{stem}.weight", index).removesuffix(".weight")
                yield f"{stored}.{kind}.weight", matrix
        elif is_of_mixture(name):
            (stored,) = names.stored([f"{stem}.weight"])
            yield f"{stored.removesuffix('.weight')}.{kind}" + name[len(f"{stem}.{kind}") :], array
        else:
            yield name, array


def _fused(lora: Lora, parameters: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """The matrices by PEFT's names, for models that store experts as stacks with interleaved rows of gate and up.

    The stack's A has the rows of gate's A, then of up's. Its B has zeros at the rows and ranks of the other one.
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
    """The stacks A and B in PEFT's form: two matrices."""
    yield f"{stem}.lora_A.weight", a.reshape(-1, a.shape[2])
    yield f"{stem}.lora_B.weight", np.ascontiguousarray(b.transpose(1, 2, 0)).reshape(b.shape[1], -1)
