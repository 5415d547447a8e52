"""Checkpoints that tests write: folders of safetensors, and single tensors of a file."""

import json

import numpy as np
from safetensors.numpy import save_file

from ckdist.models.decoder import weight_shapes
from ckdist.models.registry import spec_from_config
from ckdist.models.spec import Attention, DenseFfn, LayerSpec, ModelSpec, RopeSpec
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.tensor_source import TensorSource

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    "num_attention_heads": 2, "vocab_size": 10, "tie_word_embeddings": False,
}  # fmt: skip


def write_model(folder, config=CONFIG, prefix="", dtype=np.float32, drop=(), parts=1, **replace):
    """A folder with a random model of `config`; its tensors by Hugging Face names."""
    rng = np.random.default_rng(0)
    shapes = weight_shapes(spec_from_config(config, "config"))
    arrays = {n: rng.standard_normal(s).astype(dtype) for n, s in shapes.items() if n not in drop} | replace
    (folder / "config.json").write_text(json.dumps(config))
    stored = {prefix + n: a for n, a in arrays.items()}
    if parts == 1:
        save_file(stored, folder / "model.safetensors")
        return arrays
    weight_map = {n: f"model-{i % parts + 1:05}-of-{parts:05}.safetensors" for i, n in enumerate(stored)}
    for file in set(weight_map.values()):
        save_file({n: stored[n] for n in stored if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return arrays


WEIGHT = "model.layers.0.mlp.down_proj.weight"


def checkpoint_of(path, *sources: TensorSource) -> Checkpoint:
    """A checkpoint of `sources` alone, in a file that the test wrote."""
    layer = LayerSpec(Attention(1, 1, 4, 0.5), DenseFfn(8))
    spec = ModelSpec("llama", 8, 8, (layer,), {"global": RopeSpec(np.ones(2, np.float32))}, 1e-6, 8)
    return Checkpoint(path, "gguf", spec, {s.name: s for s in sources}, {})
