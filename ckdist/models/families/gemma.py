"""Gemma 1: Llama with scaled embeddings, a gate of GELU, and norms that multiply by 1 + weight."""

import math
from dataclasses import replace
from typing import Any

from ckdist.errors import ArchitectureError
from ckdist.models import from_config
from ckdist.models.config_keys import sizes
from ckdist.models.families import family, gemma2, llama
from ckdist.models.families.family import Fields, GgufHeader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec

KEYS = llama.KEYS.but(
    defaults={
        **sizes(layers=28, heads=16, kv_heads=16, head=256, positions=8192),
        "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
    unused=("hidden_activation",),  # hidden_act is read
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json. The published files name the tanh form of GELU gelu."""
    n, function = from_config.sizes(f), from_config.activation(f)
    ffn = from_config.dense(f, "gelu_tanh" if function == "gelu" else function)
    layers = [LayerSpec(from_config.attention(f, n), ffn)] * n.num_layers
    return from_config.model(f, outer, n, layers, embedding_scale=math.sqrt(n.hidden_size))


def gguf(header: GgufHeader) -> ModelSpec:
    n = header.sizes()
    layers = [LayerSpec(header.attention(n), header.dense("gelu_tanh"))] * n.num_layers
    return header.model(n, layers, embedding_scale=math.sqrt(n.hidden_size))


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    """No further GGUF metadata. Raises ArchitectureError for an output projection of its own."""
    if not spec.tie_embeddings:
        raise ArchitectureError(f"{where}: gemma with tie_word_embeddings false has no GGUF form")
    return {}


FAMILY = replace(
    gemma2.FAMILY, keys=KEYS, from_config=config, from_gguf=gguf, to_gguf=GgufWriter(written), gguf_names=family.GGUF
)
