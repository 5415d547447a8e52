"""mT5 (Xue et al. 2020, arXiv:2010.11934): T5 1.1 for 101 languages. Its configuration has other defaults."""

from dataclasses import replace

from ckdist.models.families import t5

KEYS = t5.KEYS.but(
    defaults={
        "d_ff": 1024, "feed_forward_proj": "gated-gelu", "num_heads": 6, "num_layers": 8,
        "scale_decoder_outputs": False, "vocab_size": 250112,
    }
)  # fmt: skip
FAMILY = replace(t5.FAMILY, keys=KEYS, gguf="t5", from_gguf=None)
