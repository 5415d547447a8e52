"""EXAONE 4: norms after each part, and a norm per head. If there are windows, layers without one do not rotate."""

from dataclasses import replace
from typing import Any

from ckdist.models import from_config
from ckdist.models.config_keys import sizes
from ckdist.models.families import llama, olmo2
from ckdist.models.families.family import Fields, GgufHeader, GgufWriter
from ckdist.models.spec import Attention, LayerSpec, ModelSpec

PERIOD = 4
KEYS = llama.KEYS.but(
    defaults={
        **sizes(layers=32, heads=32, kv_heads=32),
        "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": PERIOD,
    },
    nulls={"num_key_value_heads": None, "sliding_window": None},
    unused=(
        *("max_window_layers", "reorder_qk_norm"),  # notes of the published models
        *("layer_types", "sliding_window_pattern"),  # if there is no window
    ),
)  # fmt: skip


def sliding_layers(f: Fields, num_layers: int) -> list[bool]:
    """Reads whether each layer slides. A text as LLLG has a letter for each layer of a period; the last never does."""
    pattern = f.raw("sliding_window_pattern")
    if not isinstance(pattern, str):
        usual = from_config.periodic(num_layers, f.integer("sliding_window_pattern", low=1))
    elif pattern and not set(pattern) - set("LG"):
        usual = [pattern[i % len(pattern)] == "L" and i < num_layers - 1 for i in range(num_layers)]
    else:
        raise f.error("sliding_window_pattern", pattern, "a number, or letters L and G")
    return from_config.sliding_layers(f, num_layers, usual)


def mixers(full: Attention, window: int, sliding: list[bool]) -> list[Attention]:
    """Makes the mixers of layers."""
    slide, full = replace(full, window=window), replace(full, rope=None if window else "global")
    return [slide if slides else full for slides in sliding]


def config(f: Fields, outer: Fields) -> ModelSpec:
    n, window, ffn = from_config.sizes(f), from_config.window(f), from_config.dense(f)
    sliding = sliding_layers(f, n.num_layers) if window else [False] * n.num_layers
    layers = [LayerSpec(mixer, ffn, olmo2.NORMS) for mixer in mixers(n.attention(qk_norm="head"), window, sliding)]
    return from_config.model(f, outer, n, layers)


def gguf(header: GgufHeader) -> ModelSpec:
    n, ffn = header.sizes(), header.dense()
    made = mixers(header.attention(n), *header.windows(n.num_layers, PERIOD))
    return header.model(n, [LayerSpec(mixer, ffn, olmo2.NORMS) for mixer in made])


def written(spec: ModelSpec, where: str) -> dict[str, Any]:  # noqa: ARG001
    """Further GGUF metadata. llama.cpp applies windows only in models with 64 layers."""
    windows = [mixer.window for mixer in spec.mixers(Attention)]
    sliding = {"attention.sliding_window": max(windows), "attention.sliding_window_pattern": [w > 0 for w in windows]}
    return sliding if any(windows) else {}


FAMILY = replace(olmo2.FAMILY, keys=KEYS, from_config=config, from_gguf=gguf, to_gguf=GgufWriter(written, factors=True))
