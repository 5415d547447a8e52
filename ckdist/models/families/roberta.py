"""RoBERTa and XLM-RoBERTa, as BGE-M3 and multilingual E5: BERT with positions that begin after the padding's id."""

from dataclasses import replace

from ckdist.models.families import bert

KEYS = bert.KEYS.but(defaults={"pad_token_id": 1})
HEAD = {"classifier.dense": "model.scorer.dense", "classifier.out_proj": "model.scorer.out"}
NAMES = replace(bert.NAMES.but({"pooler.dense": (), "classifier": (), **HEAD}), outer="roberta.")
FAMILY = replace(
    bert.FAMILY,
    keys=KEYS,
    from_gguf=None,
    safetensors=NAMES,
    gguf_names=NAMES,
    ignored=(*bert.IGNORED, r"(roberta\.)?pooler\..+", r"(roberta\.)?embeddings\.position_ids"),
)
