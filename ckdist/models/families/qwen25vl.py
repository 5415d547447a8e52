"""The text part of Qwen2-VL and Qwen2.5-VL: Qwen 2 whose positions have three axes; all are the same for text.

Images are not read.
"""

from dataclasses import replace

from ckdist.models.families import qwen2, qwen35
from ckdist.models.families.family import GgufReader, GgufWriter
from ckdist.models.fields import Fields
from ckdist.models.spec import ModelSpec

NAME, GGUF = "qwen25vl", "qwen2vl"
KEYS = qwen2.KEYS.but(
    defaults={
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "max_window_layers": 80,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "vocab_size": 152064,
    },
    unused=("vision_token_id",),
)


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    return replace(qwen2.config(f, outer), family=NAME)


FAMILY = replace(
    qwen2.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=GgufReader(axes=False),
    to_gguf=GgufWriter(qwen35.written_sections, windows="use_sliding_window to false"),
)
