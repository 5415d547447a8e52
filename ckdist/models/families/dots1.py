"""dots.llm1: GLM-4.5's layers with whole heads rotated, norms of heads, and more shared experts."""

from dataclasses import replace

from ckdist.models import from_config, limits
from ckdist.models.families import family, glm4moe
from ckdist.models.families.family import Fields, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec

KEYS = replace(glm4moe.KEYS, nulls={"sliding_window": None}).but(
    defaults={
        "first_k_dense_replace": 0, "max_position_embeddings": 2048, "max_window_layers": 62, "norm_topk_prob": False,
        "num_key_value_heads": 32, "partial_rotary_factor": None, "rms_norm_eps": 1e-6, "scoring_func": "sigmoid",
        "sliding_window": 4096,
    },
    only={"moe_layer_freq": 1, "topk_method": "noaux_tc"},
    unused=("use_sliding_window",),  # transformers decides by sliding_window and max_window_layers
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    n, window = from_config.sizes(f), from_config.window(f)
    f.choice("scoring_func", ("sigmoid", "noaux_tc"))  # both mean the same
    first = f.integer("max_window_layers", low=0, high=limits.MAX_LAYERS)
    sliding = from_config.sliding_layers(f, n.num_layers, [i >= first for i in range(n.num_layers)])
    attention = from_config.attention(f, n, qk_norm="head")
    layers = [
        LayerSpec(replace(attention, window=window * slides), ffn)
        for slides, ffn in zip(sliding, glm4moe.feed_forwards(f, n.num_layers), strict=True)
    ]
    return from_config.model(f, outer, n, layers)


FAMILY = replace(
    glm4moe.FAMILY,
    keys=KEYS,
    from_config=config,
    to_gguf=GgufWriter(experts=family.GROUPED_EXPERTS, rotated=True, windows="sliding_window to null"),
    gguf_names=family.GGUF_EXPERTS,
)
