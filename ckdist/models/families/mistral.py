"""Mistral: Llama with a sliding window. Its GGUF architecture is llama."""

from ckdist.models import from_config
from ckdist.models.families import llama
from ckdist.models.families.family import Family, GgufForm
from ckdist.models.fields import Fields
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


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model. Raises ArchitectureError for windows: the architecture llama has none."""
    from ckdist.models import to_gguf

    what = "a Mistral with a sliding window ({window}) has no GGUF form that readers honour"
    to_gguf.refuse_windows(spec, where, what, "set sliding_window to null if sequences stay shorter")
    return llama.export(spec, where)


FAMILY = Family(
    name=NAME,
    architectures=("MistralForCausalLM",),
    model_types=("mistral",),
    keys=KEYS,
    gguf="llama",
    from_config=config,
    to_gguf=export,
    gguf_names=llama.FAMILY.gguf_names,
)
