"""Adapters in PEFT's format, with random weights."""

import json

import numpy as np
import pytest

from ckdist.weights.checkpoint import open_checkpoint

safetensors = pytest.importorskip("safetensors.numpy")


def random_adapter(folder, model, targets, seed=0, rank=5, scale=0.3, dtype=np.float32):
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
        added[name] = 2.5 / rank * np.float32(b) @ np.float32(a)
    folder.mkdir()
    safetensors.save_file(stored, folder / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2.5,
        "target_modules": sorted(targets),
        "bias": "none",
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return added
