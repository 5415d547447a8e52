"""EXAONE 4: norms after each part, and a norm per head. If there are windows, layers without one do not rotate."""

from dataclasses import replace
from typing import Any

from ckdist.models import from_config
from ckdist.models.config_keys import sizes
from ckdist.models.families import llama, olmo2
from ckdist.models.families.family import Fields, GgufHeader, GgufWriter
from ckdist.models.spec import Attention, DenseFfn, LayerSpec, ModelSpec

NAME, PERIOD = "exaone4", 4
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


def layers(full: Attention, ffn: DenseFfn, window: int, sliding: list[bool]) -> list[LayerSpec]:
    """Makes the layers."""
    slide, full = replace(full, window=window), replace(full, rope=None if window else "global")
    return [LayerSpec(slide if slides else full, ffn, olmo2.NORMS) for slides in sliding]


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    n, window = from_config.sizes(f), from_config.window(f)
    sliding = sliding_layers(f, n.num_layers) if window else [False] * n.num_layers
    made = layers(n.attention(qk_norm="head"), from_config.dense(f), window, sliding)
    return n.model(NAME, made, from_config.rotations(f, n), from_config.tied(f, outer))


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    from ckdist.models import from_gguf

    f, n = header.fields, from_gguf.sizes(header)
    window, sliding = from_gguf.windows(f, n.num_layers, PERIOD)
    made = layers(from_gguf.attention(header, n), from_gguf.dense(header), window, sliding)
    return n.model(NAME, made, {"global": from_gguf.rotation(header, n)}, from_gguf.tied(header))


def written(spec: ModelSpec, where: str) -> dict[str, Any]:  # noqa: ARG001
    """Further GGUF metadata. llama.cpp honours windows in models of 64 layers."""
    windows = [layer.attention.window for layer in spec.layers]
    sliding = {"attention.sliding_window": max(windows), "attention.sliding_window_pattern": [w > 0 for w in windows]}
    return sliding if any(windows) else {}


FAMILY = replace(olmo2.FAMILY, keys=KEYS, from_config=config, from_gguf=gguf, to_gguf=GgufWriter(written, factors=True))
