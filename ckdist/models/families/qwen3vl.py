"""The text part of Qwen3-VL: Qwen 3 whose positions have three axes; all are the same for text. Images are not read."""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.families import qwen3, qwen35
from ckdist.models.families.family import GgufForm, GgufHeader
from ckdist.models.fields import Fields
from ckdist.models.spec import LayerSpec, ModelSpec

NAME = "qwen3vl"
KEYS = qwen3.KEYS.but(
    defaults={
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "max_position_embeddings": 128000,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rope_theta": 5e5,
        "sliding_window": None,
        "vocab_size": 151936,
    },
    unused=("max_window_layers", "sliding_window"),  # transformers has no windows in this family
)


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    n, bias = from_config.sizes(f), f.flag("attention_bias")
    layers = [LayerSpec(n.attention(qkv_bias=bias, o_bias=bias, qk_norm="head"), from_config.dense(f))] * n.num_layers
    ropes = from_config.rotations(f, n, mrope_interleaved=True)
    return n.model(NAME, layers, ropes, from_config.tied(f, outer))


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    from ckdist.models import from_gguf

    n = from_gguf.sizes(header)
    layers = [LayerSpec(from_gguf.attention(header, n), from_gguf.dense(header))] * n.num_layers
    return n.model(NAME, layers, {"global": qwen35.gguf_rotation(header, n)}, from_gguf.tied(header))


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model. The features of images, which it does not hold, have no layers."""
    from ckdist.models import to_gguf

    more = {"rope.dimension_sections": qwen35.sections(spec.ropes["global"]), "n_deepstack_layers": 0}
    return to_gguf.dense(NAME, spec, where, more)


FAMILY = replace(
    qwen3.FAMILY,
    name=NAME,
    architectures=("Qwen3VLForConditionalGeneration",),
    model_types=("qwen3_vl", "qwen3_vl_text"),
    keys=KEYS,
    gguf=NAME,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
)
