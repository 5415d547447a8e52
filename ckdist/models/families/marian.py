"""Marian (Junczys-Dowmunt et al. 2018, arXiv:1804.00344), the architecture of the OPUS translators.

It is BART with sinusoidal positions, and without a norm of the embeddings. Decoding begins with the padding token,
which is never sampled.
"""

from dataclasses import replace

from ckdist.models import limits, rope
from ckdist.models.families import bart
from ckdist.models.fields import Fields
from ckdist.models.spec import ModelSpec

KEYS = bart.KEYS.but(
    defaults={
        "bos_token_id": None, "decoder_start_token_id": 58100, "vocab_size": 58101,
    },
    only={
        "normalize_embedding": False, "share_encoder_decoder_embeddings": True, "static_position_embeddings": True,
    },
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json. Raises ModelFileError if the two languages have separate vocabularies."""
    hidden = f.integer("d_model", high=limits.MAX_WIDTH)
    waves = rope.unscaled(hidden, 1e4)
    spec = bart.model(f, outer, norm_first=False, waves="global", ropes={"global": waves})
    pad = f.integer("pad_token_id", spec.start_tokens[0], low=0, high=spec.vocab_size - 1)
    if (rows := f.integer("decoder_vocab_size", spec.vocab_size, high=limits.MAX_VOCAB)) != spec.vocab_size:
        raise f.error("decoder_vocab_size", rows, f"the same as vocab_size, which is {spec.vocab_size}")
    return replace(spec, start_tokens=spec.start_tokens[:1], banned_tokens=tuple(sorted({*spec.banned_tokens, pad})))


FAMILY = replace(
    bart.FAMILY,
    keys=KEYS,
    from_config=config,
    ignored=(*bart.COPIES, r"model\.(en|de)coder\.embed_positions\.weight"),  # which are computed
)
