"""Mistral: Llama with a sliding window. Its GGUF architecture is llama."""

from ckdist.models import from_config
from ckdist.models.families import llama
from ckdist.models.families.family import Family, Fields, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec

NAME = "mistral"
KEYS = llama.KEYS.but(
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    nulls={"num_key_value_heads": None, "sliding_window": None},
)


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    n = from_config.sizes(f)
    window = from_config.window(f)
    attention = n.attention(window=window)
    layers = [LayerSpec(attention, from_config.dense(f))] * n.num_layers
    return n.model(NAME, layers, from_config.rotations(f, n), from_config.tied(f, outer))


FAMILY = Family(
    keys=KEYS,
    gguf="llama",
    from_config=config,
    to_gguf=GgufWriter(rotated=True, factors=True, windows="sliding_window to null"),
    gguf_names=llama.FAMILY.gguf_names,
)
