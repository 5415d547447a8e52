"""K-EXAONE: EXAONE 4's attention, with norms before each part, and GLM-4.5's experts."""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.config_keys import sizes
from ckdist.models.families import exaone4, family, glm4moe
from ckdist.models.families.family import Fields, GgufHeader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec

KEYS = glm4moe.KEYS.but(
    defaults={
        **sizes(hidden=4096, ffn=16384, layers=32, heads=32, kv_heads=32, positions=2048, vocab=102400),
        "moe_intermediate_size": 1024, "num_experts": 64, "partial_rotary_factor": None, "routed_scaling_factor": 2.5,
        "sliding_window": 4096, "sliding_window_pattern": exaone4.PERIOD,
    },
    aliases={
        "first_last_k_dense_replace": "first_k_dense_replace",
        "num_local_experts": "num_experts",
        "num_shared_experts": "n_shared_experts",
    },
    nulls={"sliding_window": None},
    only={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    unused=("layer_types", "sliding_window_pattern"),  # if there is no window
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    n, window, dense = from_config.sizes(f), from_config.window(f), from_config.dense_layers(f)
    if (given := f.raw("is_moe_layer")) not in (None, [i >= dense for i in range(n.num_layers)]):
        raise f.error("is_moe_layer", given, f"false in the first {dense} of {n.num_layers} layers, then true")
    sliding = exaone4.sliding_layers(f, n.num_layers) if window else [False] * n.num_layers
    mixers = exaone4.mixers(n.attention(qk_norm="head"), window, sliding)
    ffns = glm4moe.feed_forwards(f, n.num_layers, "num_experts")
    return from_config.model(f, outer, n, [LayerSpec(*parts) for parts in zip(mixers, ffns, strict=True)])


def gguf(header: GgufHeader) -> ModelSpec:
    spec = glm4moe.gguf(header)
    windows = header.windows(len(spec.layers), exaone4.PERIOD)
    return spec.with_layers(mixer=exaone4.mixers(spec.layers[0].attention, *windows))


FAMILY = replace(
    glm4moe.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(exaone4.written, ("expert_shared_feed_forward_length", *family.GROUPED_EXPERTS), rotated=True),
    safetensors=glm4moe.FAMILY.safetensors.but_in_layers({"mlp.e_score_correction": "mlp.gate.e_score_correction"}),
    gguf_names=family.GGUF_EXPERTS,
)
