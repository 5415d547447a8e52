"""Small model specs of every family, and random weights for their programs."""

import numpy as np

from ckdist.models.spec import ModelSpec, RopeSpec


def spec(heads=6, kv_heads=3, head_dim=16, ffn=176, vocab=100, **more):
    rope = RopeSpec((1e4 ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32))
    return ModelSpec(
        "qwen3", vocab, 64, ffn, 2, heads, kv_heads, head_dim, 1e-6, 512, rope, attention_scale=head_dim**-0.5, **more
    )


FAMILIES = {
    "llama": {},
    "qwen2": {"qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"qk_norm": True, "tie_embeddings": True},
    "gemma2": {
        "post_norms": True,
        "activation": "gelu_tanh",
        "attention_soft_cap": 50.0,
        "logit_soft_cap": 30.0,
        "embedding_scale": 8.0,
        "sliding_window": 4,
        "sliding_layers": (True, False),
        "tie_embeddings": True,
    },
}


def weights_of(program):
    rng = np.random.default_rng(0)
    return {w.name: rng.standard_normal([d.elements for d in w.dims]).astype(np.float32) * 0.1 for w in program.weights}
