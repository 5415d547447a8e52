"""LoRA adapters in GGUF, in llama.cpp's form: `NAME.lora_a` (rank, in) and `NAME.lora_b` (out, rank) for a weight."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.models.decoder import weight_shapes
from ckdist.models.families.family import Family, Form
from ckdist.models.registry import family
from ckdist.models.spec import ModelSpec
from ckdist.weights.adapter_file import ANOTHER_MODEL, HALVES, MODULES, Matrices, StoredAdapter, halves
from ckdist.weights.dequantize import read_tensor
from ckdist.weights.gguf import read_gguf
from ckdist.weights.stored_weights import head_dim, weights_of
from ckdist.weights.tensor_source import StoredTensor

ALPHA = "adapter.lora.alpha"
KEYS = ("adapter.type", ALPHA, "adapter.lora.task_name", "adapter.lora.prompt_prefix")  # the last two only inform
UNREAD_FORMS: tuple[Form, ...] = ("joined", "keys_values", "alternating", "transposed")


def read_gguf_adapter(file: Path, spec: ModelSpec, scaled: bool) -> StoredAdapter:
    """Reads an adapter of a model, as `load_adapter`, and raises ModelFileError for the same reasons."""
    model, own = read_gguf(file), family(spec.family)
    alpha, shapes = _alpha(file, model.metadata, own), weight_shapes(spec)
    found: Matrices = {}
    scales = dict[str, float]()
    for name, a in model.tensors.items():
        stored, _, kind = name.rpartition(".")
        other = f"{stored}.lora_{'b' if kind == 'lora_a' else 'a'}"
        weights = weights_of(own.gguf_names, stored, shapes)
        stems = [weight.removesuffix(".weight") for weight in weights]
        known = stems and all(stem.rpartition(".")[2] in MODULES for stem in stems)
        if kind not in ("lora_a", "lora_b") or not known or any(own.gguf_names.has(f, stored) for f in UNREAD_FORMS):
            raise ModelFileError(
                f"{file}: tensor {name!r:.120} is not a matrix of LoRA on one of {', '.join(MODULES)}: merge it into "
                "its base, and give that model"
            )
        if other not in model.tensors:
            raise ModelFileError(f"{file} has {name}, but not {other}")
        if kind == "lora_a":
            interleaved = own.gguf_names.has("interleaved", weights[0])
            head_rows = head_dim(spec, weights[0]) if interleaved else 0
            scale = alpha / a.shape[-2] if alpha and len(a.shape) > 1 else 1.0
            in_values = scaled or len(a.shape) != 2
            pair = _pair(a, model.tensors[other], scale if in_values else 1.0, head_rows)
            if not in_values:
                scales |= {f"{stem}.lora_A.weight": scale for stem in stems}
            found |= _by_weight(stems, [shapes[weight][-2] for weight in weights], pair, f"{file}: {other}")
    if not found:
        raise ModelFileError(f"{file} holds no matrix")
    return StoredAdapter(found, (), scales)


def _alpha(file: Path, metadata: Mapping[str, Any], own: Family) -> float:
    """alpha, or 0 if B has the whole scale. Raises ModelFileError if it is no LoRA adapter of the family."""
    kind, adapter = metadata.get("general.type"), metadata.get("adapter.type")
    if (kind, adapter) != ("adapter", "lora"):
        raise ModelFileError(
            f"{file} has general.type {kind!r:.40} and adapter.type {adapter!r:.40}; an adapter has adapter and lora"
        )
    architecture = metadata.get("general.architecture")
    if architecture != own.gguf:
        raise ModelFileError(f"{file} is for architecture {architecture!r:.40}, and the model's is {own.gguf!r}")
    if unknown := [key for key in metadata if key.startswith("adapter.") and key not in KEYS]:
        raise ModelFileError(f"{file}: {unknown[0]:.80} is not supported: take an adapter without it")
    alpha = metadata.get(ALPHA, 0.0)
    if not isinstance(alpha, float) or not math.isfinite(alpha):
        raise ModelFileError(f"{file}: {ALPHA} is {alpha!r:.40}, and must be a finite number")
    return alpha


def _pair(a: StoredTensor, b: StoredTensor, scale: float, head_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """A, and B times `scale`. `head_rows`: rows of a head of B whose halves are interleaved; 0: none are."""
    ranks = (*a.shape[:-2], a.shape[-2]), (*b.shape[:-2], b.shape[-1])
    if len(a.shape) not in (2, 3) or len(b.shape) != len(a.shape) or ranks[0] != ranks[1]:
        raise ModelFileError(
            f"{a.file}: {a.name} and {b.name} have shapes {list(a.shape)} and {list(b.shape)}, and must be "
            "(rank, in) and (out, rank)"
        )
    if head_rows and b.shape[-2] % head_rows:
        raise ModelFileError(
            f"{b.file}: {b.name} has {b.shape[-2]} rows, and a head of the model {head_rows}: {ANOTHER_MODEL}"
        )
    low, values = _read(a), _read(b, head_rows) * np.float32(scale)
    is_half = {a.dtype, b.dtype} <= HALVES and low.ndim == 2
    return halves(low, values) if is_half else (low, values)


def _read(tensor: StoredTensor, head_rows: int = 0) -> np.ndarray:
    rows = math.prod(tensor.shape[:-1])
    source = replace(tensor.source, shape=(rows, tensor.shape[-1]), head_rows=head_rows)
    return read_tensor(source).reshape(tensor.shape)


def _by_weight(stems: Sequence[str], rows: Sequence[int], pair: tuple[np.ndarray, np.ndarray], where: str) -> Matrices:
    """The matrices by the model's names. B has the rows of the weights in order."""
    low, values = pair
    if values.shape[-2] != sum(rows):
        raise ModelFileError(f"{where} has {values.shape[-2]} rows, and the model needs {sum(rows)}: {ANOTHER_MODEL}")
    found: Matrices = {}
    for stem, part in zip(stems, np.split(values, np.cumsum(rows)[:-1], axis=-2), strict=True):
        found[f"{stem}.lora_A.weight"] = low
        found[f"{stem}.lora_B.weight"] = np.ascontiguousarray(part)
    return found
