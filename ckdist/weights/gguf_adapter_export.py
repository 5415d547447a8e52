"""Writes a LoRA adapter of PEFT's form as a GGUF file for llama.cpp: `blk.0.attn_q.weight.lora_a` and `.lora_b`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ckdist.errors import ConfigError
from ckdist.models.registry import family
from ckdist.weights import dtypes
from ckdist.weights.adapter_file import Matrices
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.gguf_export import interleaved, write_replacing
from ckdist.weights.gguf_writer import GgufTensorToWrite
from ckdist.weights.merged_weights import MergedWeights
from ckdist.weights.stored_weights import head_dim, heads_of


def export_adapter(base: str, folder: str, target: str) -> int:
    """Writes the adapter in `folder`, which belongs to the model `base`, and returns the file's size in bytes.

    All matrices get the largest rank, and B includes the scale, so that alpha is this rank.

    Raises:
        ConfigError: The target cannot be used, or the format has no place for the adapter.
        ModelFileError: A file is invalid, or the adapter is another model's.
        EngineError: The file cannot be written.
    """
    path = Path(target)
    if path.is_dir():
        raise ConfigError(f"{target} is a folder: name the file to write, as {path / 'adapter.gguf'}")
    checkpoint = open_checkpoint(base)
    merged, spec = MergedWeights(checkpoint, Path(folder)), checkpoint.spec
    own = family(spec.family)
    names, stacks = own.gguf_names, [stem for stem in merged.stems if merged.matrices[f"{stem}.lora_A.weight"].ndim > 2]
    if stacks or own.gguf_values:
        reason = f"{stacks[0]} is of experts" if stacks else f"files of {own.name} change the order of its rows"
        raise ConfigError(f"{folder} cannot be a GGUF adapter: {reason}; merge it with ckdist merge")
    tensors: list[tuple[str, np.ndarray, np.ndarray]] = []
    for written, parts in names.stored(checkpoint.tensors).items():
        if not any(f"{part.removesuffix('.weight')}.lora_A.weight" in merged.matrices for part in parts):
            continue
        heads = heads_of(spec, parts[0]) if names.has("joined", written) else 1
        head_rows = head_dim(spec, parts[0]) if names.has("interleaved", parts[0]) else 0
        rows = [checkpoint.tensors[part].shape[0] for part in parts]
        tensors.append((written, *_joined(merged.matrices, parts, rows, heads, head_rows)))
    rank = max(len(a) for _, a, _ in tensors)
    metadata = {
        "general.type": "adapter",
        "general.architecture": own.gguf_form(spec, base).metadata["general.architecture"],
        "general.name": Path(folder).resolve().name,
        "adapter.type": "lora",
        "adapter.lora.alpha": float(rank),
    }
    return write_replacing(
        path, metadata, [t for name, a, b in tensors for t in _written(name, a, b, rank)], progress=False
    )


def _joined(
    matrices: Matrices, parts: Sequence[str], rows: Sequence[int], heads: int, head_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """A (ranks, in) and B (rows, ranks) of the weights `parts`, with zeros for those without matrices.

    They are joined as the GGUF joins the weights.
    """
    stems = [part.removesuffix(".weight") for part in parts]
    low = [matrices.get(f"{stem}.lora_A.weight") for stem in stems]
    ranks = [0 if a is None else len(a) for a in low]
    b, at = [], 0
    for stem, count, rank in zip(stems, rows, ranks, strict=True):
        own = np.zeros((count, sum(ranks)), np.float32)
        if rank:
            own[:, at : at + rank] = matrices[f"{stem}.lora_B.weight"]
        at += rank
        b.append(interleaved(own, head_rows).reshape(heads, -1, sum(ranks)))
    return np.concatenate([a for a in low if a is not None]), np.concatenate(b, axis=1).reshape(-1, sum(ranks))


def _written(name: str, a: np.ndarray, b: np.ndarray, rank: int) -> list[GgufTensorToWrite]:
    """Both matrices in float32, padded to `rank`."""
    a, b = np.pad(a, ((0, rank - len(a)), (0, 0))), np.pad(b, ((0, 0), (0, rank - b.shape[1])))
    return [
        GgufTensorToWrite(
            f"{name}.lora_{kind}",
            dtypes.F32,
            array.shape,
            lambda array=array: [np.ascontiguousarray(array, np.float32).view(np.uint8)],
        )
        for kind, array in (("a", a), ("b", b))
    ]
