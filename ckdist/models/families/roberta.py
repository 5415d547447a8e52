"""RoBERTa and XLM-RoBERTa, of which BGE-M3 and multilingual E5 are: BERT whose positions begin behind the padding."""

from dataclasses import replace

from ckdist.models.families import bert

NAME = "roberta"
NAMES = replace(bert.NAMES, outer="roberta.")
FAMILY = replace(
    bert.FAMILY,
    name=NAME,
    architectures=("RobertaModel", "XLMRobertaModel", "RobertaForMaskedLM", "XLMRobertaForMaskedLM"),
    model_types=bert.ROBERTA,
    gguf=NAME,
    from_config=lambda f, outer: replace(bert.config(f, outer), family=NAME),
    safetensors=NAMES,
    gguf_names=NAMES,
    ignored=(*bert.IGNORED, r"(roberta\.)?pooler\..+", r"(roberta\.)?embeddings\.position_ids"),
)
