"""The text part of Qwen3-VL: Qwen 3 whose positions have three axes; all are the same for text. Images are not read."""

from dataclasses import replace
from typing import Any

from ckdist.models import from_config
from ckdist.models.config_keys import sizes
from ckdist.models.families import qwen3, qwen35
from ckdist.models.families.family import Fields, GgufReader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec

KEYS = qwen3.KEYS.but(
    defaults={
        **sizes(hidden=4096, ffn=22016, layers=32, heads=32, kv_heads=32, positions=128000, vocab=151936),
        "rope_theta": 5e5, "sliding_window": None,
    },
    unused=("max_window_layers", "sliding_window"),  # transformers has no windows in this family
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    layer = LayerSpec(from_config.attention(f, n, qk_norm="head"), from_config.dense(f))
    ropes = from_config.rotations(f, n, mrope_interleaved=True)
    return from_config.model(f, outer, n, [layer] * n.num_layers, ropes)


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    """Further GGUF metadata. The features of images, which it does not hold, have no layers."""
    return {**qwen35.written_sections(spec, where), "n_deepstack_layers": 0}


FAMILY = replace(
    qwen3.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=GgufReader(rotation=qwen35.ROTATION, axes=True),
    to_gguf=GgufWriter(written),
)
