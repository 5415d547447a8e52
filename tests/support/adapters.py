"""Adapters with random weights in PEFT's format, and the same in GGUF."""

import json

import numpy as np
import pytest

from ckdist.models.registry import family
from ckdist.weights.adapter_file import load_adapter
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dtypes import F32
from ckdist.weights.gguf_writer import GgufTensorToWrite, write_gguf
from ckdist.weights.stored_weights import head_dim

safetensors = pytest.importorskip("safetensors.numpy")


def random_adapter(folder, model, targets, seed=0, rank=5, scale=0.3, dtype=np.float32, alpha=2.5):
    """An adapter in PEFT's format, written here without ckdist, and the matrices that it adds by the names of the
    weights.
    """
    rng, stored, added = np.random.default_rng(seed), {}, {}
    for name, tensor in open_checkpoint(model).tensors.items():
        stem = name.removesuffix(".weight")
        # one of a gated pair has none
        if stem.rpartition(".")[2] not in targets or stem.startswith("model.layers.1.mlp.up"):
            continue
        out, into = tensor.shape
        a, b = (scale * rng.standard_normal(shape).astype(dtype) for shape in ((rank, into), (out, rank)))
        stored |= {f"base_model.model.{stem}.lora_A.weight": a, f"base_model.model.{stem}.lora_B.weight": b}
        added[name] = alpha / rank * np.float32(b) @ np.float32(a)
    folder.mkdir()
    safetensors.save_file(stored, folder / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(targets),
        "bias": "none",
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return added


def as_gguf(file, folder, model, **metadata):
    """Writes the adapter of PEFT's folder in llama.cpp's form, in float32."""
    spec = open_checkpoint(model).spec
    own, matrices = family(spec.family), load_adapter(folder, spec).matrices
    weights = [name.replace(".lora_A", "") for name in matrices if ".lora_A" in name]
    found = {}
    for stored, parts in own.gguf_names.stored(weights).items():
        stems = [part.removesuffix(".weight") for part in parts]
        low, rank = matrices[f"{stems[0]}.lora_A.weight"], matrices[f"{stems[0]}.lora_A.weight"].shape[-2]
        values = np.concatenate([matrices[f"{stem}.lora_B.weight"] for stem in stems], axis=-2)
        if own.gguf_names.has("interleaved", parts[0]):
            heads = values.reshape(-1, 2, head_dim(spec, parts[0]) // 2, rank)
            values = heads.swapaxes(1, 2).reshape(values.shape)
        found |= {f"{stored}.lora_a": low, f"{stored}.lora_b": values * np.float32(rank / 2)}
    tensors = [
        GgufTensorToWrite(name, F32, array.shape, lambda array=array: np.ascontiguousarray(array, np.float32))
        for name, array in found.items()
    ]
    own_metadata = {"general.architecture": own.gguf, "general.type": "adapter", "adapter.type": "lora"}
    write_gguf(file, {**own_metadata, "adapter.lora.alpha": 2.0, **metadata}, tensors)
