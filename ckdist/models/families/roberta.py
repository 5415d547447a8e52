"""RoBERTa and XLM-RoBERTa, as BGE-M3 and multilingual E5: BERT with positions that begin after the padding's id."""

from dataclasses import replace

from ckdist.models.families import bert

NAME = "roberta"
KEYS = bert.KEYS.but(defaults={"pad_token_id": 1})
HEAD = {"classifier.dense": "model.scorer.dense", "classifier.out_proj": "model.scorer.out"}
NAMES = replace(bert.NAMES.but({"pooler.dense": (), "classifier": (), **HEAD}), outer="roberta.")
KINDS = ("Model", "ForMaskedLM", "ForSequenceClassification")
FAMILY = replace(
    bert.FAMILY,
    name=NAME,
    architectures=tuple(f"{name}{kind}" for kind in KINDS for name in ("Roberta", "XLMRoberta")),
    model_types=bert.ROBERTA,
    keys=KEYS,
    gguf=NAME,
    from_config=lambda f, outer: replace(bert.config(f, outer), family=NAME),
    from_gguf=None,
    safetensors=NAMES,
    gguf_names=NAMES,
    ignored=(*bert.IGNORED, r"(roberta\.)?pooler\..+", r"(roberta\.)?embeddings\.position_ids"),
)
