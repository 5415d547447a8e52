"""The text part of Qwen2-VL and Qwen2.5-VL: Qwen 2 whose positions have three axes; all are the same for text.

Images are not read.
"""

from dataclasses import replace

from ckdist.models.config_keys import sizes
from ckdist.models.families import qwen2, qwen35
from ckdist.models.families.family import GgufReader, GgufWriter

KEYS = qwen2.KEYS.but(
    defaults={
        **sizes(hidden=8192, ffn=29568, layers=80, heads=64, kv_heads=8, vocab=152064),
        "max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    },
    unused=("vision_token_id",),
)  # fmt: skip


FAMILY = replace(
    qwen2.FAMILY,
    keys=KEYS,
    from_gguf=GgufReader(axes=False),
    to_gguf=GgufWriter(qwen35.written_sections, windows="use_sliding_window to false"),
)
