"""Small model specs of every family, and random weights for their programs."""

import functools
import threading
from dataclasses import replace

import numpy as np

from ckdist.models.families.gemma2 import NORMS
from ckdist.models.indexers import Indexer
from ckdist.models.spec import Attention, DenseFfn, LatentAttention, LayerSpec, ModelSpec, MoeFfn, Norms, RopeSpec
from ckdist.models.state_mixers import AttentionAndMamba, GatedConv, GatedDeltaNet, Mamba2
from ckdist.program.query_scale import QueryScale
from ckdist.program.routing import Routing


def rope(dims=16, **more):
    return RopeSpec((1e4 ** (-np.arange(0, dims, 2) / dims)).astype(np.float32), **more)


def spec(
    heads=6,
    kv_heads=3,
    head_dim=16,
    ffn=176,
    vocab=100,
    hidden=64,
    mixer=None,
    layer=None,
    changes=None,
    first=(),
    **more,
):
    """Two layers; `mixer` and `layer` are further fields of both, `changes` of each layer's mixer. `first`: mixers of
    layers before these.
    """
    attention = Attention(heads, kv_heads, head_dim, head_dim**-0.5, **(mixer or {}))
    changes = changes(heads, kv_heads) if callable(changes) else changes
    changed = [replace(attention, **change) for change in changes or ({}, {})]
    fields = {"ffn": DenseFfn(ffn), **(layer or {})}
    if "activation" in more:
        fields["ffn"] = DenseFfn(ffn, more.pop("activation"))
    layers = tuple(LayerSpec(a, **fields) for a in (*first, *changed))
    return ModelSpec(
        "qwen3", vocab, hidden, layers, {"global": rope(head_dim), **more.pop("ropes", {})}, 1e-6, 512, **more
    )


FAMILIES = {
    "llama": {},
    "qwen2": {"mixer": {"qkv_bias": True}, "tie_embeddings": True},
    "qwen3": {"mixer": {"qk_norm": "head"}, "tie_embeddings": True},
    "gemma2": {
        "layer": {"norms": NORMS},
        "activation": "gelu_tanh",
        "mixer": {"soft_cap": 50.0},
        "changes": ({"window": 4}, {}),
        "logit_soft_cap": 30.0,
        "embedding_scale": 8.0,
        "tie_embeddings": True,
    },
}
# What no family above has: norms after, norms over all heads of a token, layers without rotation, multipliers, a part
# of a head rotated in neighbours, layers that differ in heads and widths, norms after a rotation, queries scaled by
# position, experts, sinks, biases.
PIECES = {
    "norms_after": {
        "layer": {"norms": Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")},
        "mixer": {"qk_norm": "row"},
    },
    "multipliers": {"layer": {"residual_scale": 0.22}, "embedding_scale": 12.0, "logit_scale": 0.125},
    "no_rope": {"changes": ({"rope": None}, {"rope": "local"}), "ropes": {"local": rope(8, interleaved=True)}},
    "unequal": {
        "changes": lambda heads, kv_heads: (
            {"num_kv_heads": heads, "value_dim": 24},
            {"num_heads": 2 * kv_heads, "head_dim": 8, "value_dim": 16, "rope": "local", "window": 5},
        ),
        "ropes": {"local": rope(8)},
    },
    "norms_rotated": {
        "mixer": {"qk_norm": "head", "norms_rotated": True},
        "changes": ({"query_scale": QueryScale(0.4, 3)}, {"rope": None, "query_scale": QueryScale(0.2, 2)}),
    },
    "experts": {"layer": {"ffn": MoeFfn(9, 72, Routing(2))}},
    "experts_in_groups": {
        "layer": {
            "ffn": MoeFfn(
                8,
                40,
                Routing(3, "sigmoid", renormalise=True, scale=2.5, groups=4, top_groups=2),
                correction_bias=True,
                shared_size=104,
                shared_gate=True,
            )
        }
    },
    "sinks_and_biases": {
        "mixer": {"sinks": True, "qkv_bias": True, "o_bias": True},
        "changes": ({"window": 5}, {}),
        "layer": {"ffn": MoeFfn(5, 72, Routing(2), "clamped_swiglu", bias=True)},
    },
}
# Layers that keep a state of every sequence, gates behind attention, and latent attention.
LINEAR = {
    "gated_delta_net": {
        "first": (GatedDeltaNet(3, 6, 16, 40), GatedDeltaNet(5, 5, 9, 16, conv_kernel=3)),
        "mixer": {"qk_norm": "head", "gated": "sigmoid", "value_dim": 24},
        "ropes": {"global": rope(8)},
    },
    "kimi_delta_attention": {
        "first": (
            GatedDeltaNet(5, 5, 9, 16, conv_kernel=3, by_row=True, gate_rank=7),
            GatedDeltaNet(3, 3, 16, 40, by_row=True, gate_rank=4),
            LatentAttention(5, 32, 24, 16, 20, 0.2, rope=None),
        ),
    },
    "sparse": {
        "first": (
            LatentAttention(5, 32, 24, 16, 20, 0.2, q_lora_rank=36, indexer=Indexer(12, 16, 7, "local")),
            LatentAttention(9, 40, 16, 16, 24, 0.2, q_lora_rank=20, shares_positions=True),
        ),
        "ropes": {"local": rope(16), "global": rope(16, interleaved=True)},
    },
    "latent": {
        "first": (
            LatentAttention(5, 32, 24, 16, 20, 0.2, q_lora_rank=36),
            LatentAttention(9, 40, 16, 16, 24, 0.2, rope="local", query_scale=QueryScale(0.4, 3)),
        ),
        "ropes": {"local": rope(16, interleaved=True)},
    },
    "mamba2": {
        "first": (
            Mamba2(6, 12, 3, 9, norm_groups=2, dt_limits=(0.02, 1.5), scales=(0.8, 1.2, 0.9, 1.1, 0.7)),
            Mamba2(5, 32, 1, 16, conv_kernel=3, conv_bias=False, bias=True, norm_groups=0),
            None,
            AttentionAndMamba(Attention(4, 2, 16, 0.2), Mamba2(4, 40, 2, 8), 0.7, 1.3),
        ),
        "layer": {"ffn": MoeFfn(5, 72, Routing(2), "relu2", shared_size=40, gated=False)},
    },
    "embeddings_normed": {
        "embedding_eps": 1e-5,
        "layer": {"norms": replace(NORMS, after_eps=1e-4), "ffn": DenseFfn(176, limit=0.5)},
    },
    "gated_conv": {"first": (GatedConv(96), GatedConv(96, 5, bias=True))},
    "bounded_decay": {  # and gates behind latent attention, one gate for each head, and limits of gates
        "first": (
            GatedDeltaNet(5, 5, 9, 16, by_row=True, decay_floor=-5.0, beta_scale=2.0, norm_eps=1e-5),
            LatentAttention(5, 32, 24, 16, 20, 0.2, gated=True),
        ),
        "mixer": {"gated": "softplus", "head_gates": True, "value_dim": 24},
        "changes": ({}, {"gated": "sigmoid"}),
        "layer": {"ffn": MoeFfn(5, 72, Routing(2), shared_size=40, limits=(7.0, 0.5))},
        "ropes": {"global": rope(16)},
    },
    "tiled_heads": {"first": (GatedDeltaNet(2, 6, 16, 32, tiled=True),), "mixer": {"gated": "sigmoid"}},
}


def resized(s, ffn=None, layers=None, hidden_size=None, **mixer):
    """A spec with other sizes; `mixer`: fields of its attention, `layers`: how many are left."""
    change = lambda layer: replace(
        layer,
        mixer=replace(layer.mixer, **mixer),
        ffn=replace(layer.ffn, intermediate_size=ffn or layer.ffn.intermediate_size),
    )
    return replace(s, layers=tuple(map(change, s.layers[:layers])), hidden_size=hidden_size or s.hidden_size)


def dims(g, s):
    """The named dimensions of a spec whose layers are alike, under the layout of a tracer."""
    a, make = s.layers[0].mixer, g.sharding
    heads, keys = make.heads(a.num_heads, a.num_kv_heads, a.head_dim)
    sizes = {"hidden": make.hidden(s.hidden_size), "ffn": make.ffn(s.layers[0].ffn.intermediate_size)}
    return {"tokens": make.tokens, "heads": heads, "kv_heads": keys, "vocab": make.vocab(s.vocab_size), **sizes}


_one_at_a_time = threading.Lock()  # ranks are threads, and all but one wait for the weights that one draws


def weights_of(program):
    with _one_at_a_time:
        return dict(_weights(tuple((w.name, tuple(d.elements for d in w.dims)) for w in program.weights)))


@functools.lru_cache(4)
def _weights(shapes):
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) * 0.1 for name, shape in shapes}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays
