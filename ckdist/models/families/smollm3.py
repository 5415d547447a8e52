"""SmolLM3: Llama without a rotation in every fourth layer."""

from dataclasses import replace
from typing import Any

from ckdist.errors import ArchitectureError
from ckdist.models import from_config
from ckdist.models.config_keys import sizes
from ckdist.models.families import llama
from ckdist.models.families.family import Fields, GgufHeader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec

THETA, PERIOD = 2e6, 4
KEYS = llama.KEYS.but(
    defaults={
        **sizes(layers=36, heads=16, kv_heads=4, positions=32768),
        "no_rope_layer_interval": PERIOD, "rope_theta": THETA, "tie_word_embeddings": True,
    },
    nulls={"num_key_value_heads": None},
    unused=("max_window_layers",),
)  # fmt: skip


def rotated_layers(f: Fields, num_layers: int) -> list[bool]:
    """Reads whether each layer rotates: contrary to its name, `no_rope_layers` is 1 for layers that do."""
    given, period = f.raw("no_rope_layers"), f.integer("no_rope_layer_interval")
    if given is None:
        return from_config.periodic(num_layers, period)
    if not isinstance(given, list) or len(given) < num_layers or any(value not in (0, 1) for value in given):
        raise f.error("no_rope_layers", given, f"a list of at least {num_layers} of 0 and 1")
    return [bool(value) for value in given[:num_layers]]


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    rotated = rotated_layers(f, n.num_layers)
    window = from_config.window(f) * f.flag("use_sliding_window")
    sliding = from_config.sliding_layers(f, n.num_layers, [not rotates for rotates in rotated])
    attention, ffn = from_config.attention(f, n), from_config.dense(f, bias=f.flag("mlp_bias"))
    layers = [
        LayerSpec(replace(attention, rope="global" if rotates else None, window=window * slides), ffn)
        for rotates, slides in zip(rotated, sliding, strict=True)
    ]
    return from_config.model(f, outer, n, layers)


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata. It implies that every fourth layer has no rotation."""
    n, ffn = header.sizes(), header.dense()
    full = LayerSpec(header.attention(n), ffn)
    still = replace(full, mixer=replace(full.attention, rope=None))
    layers = [full if (i + 1) % PERIOD else still for i in range(n.num_layers)]
    return header.model(n, layers, {"global": header.rotation(n, THETA)})


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    """No further GGUF metadata. Raises ArchitectureError for other layers without rotation than GGUF readers know."""
    if any((layer.attention.rope is None) == bool((i + 1) % PERIOD) for i, layer in enumerate(spec.layers)):
        raise ArchitectureError(
            f"{where}: a SmolLM3 without rotation in other than every {PERIOD}th layer has no GGUF form"
        )
    return {}


FAMILY = replace(
    llama.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(written, rotated=True, windows="use_sliding_window to false"),
)
