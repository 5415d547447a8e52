"""Decoders that rank documents: they answer yes or no to a question about a query and a document (Qwen3-Reranker)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.models.decoder import OUTPUT, SCORE
from ckdist.models.fields import Fields
from ckdist.text_file import read_text_file
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.tokens.tokenizer_folder import MAX_TEMPLATE_BYTES
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.dequantize import read_rows
from ckdist.weights.gguf import read_gguf
from ckdist.weights.json_file import read_json_object
from ckdist.weights.stored_pooling import LOGIT_SCORE

QUERY, DOCUMENT = "{query}", "{document}"
RERANK_FILE = ("additional_chat_templates", "rerank.jinja")  # beside the head of a reward model
TEMPLATE = (  # of the model card; GGUF files have it too
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    f"<Query>: {QUERY}\n<Document>: {DOCUMENT}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
LABELS = ["yes", "no"]
CLASSIFIER = "cls.output.weight"  # of a GGUF: a row for each label


@dataclass(frozen=True)
class Ranking:
    """The question, and the vector whose product with the last hidden state is logit(yes) - logit(no)."""

    template: str  # with QUERY and DOCUMENT
    direction: np.ndarray  # float32 (hidden,)


def stored_ranking(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Ranking:
    """The ranking of a decoder. Raises ModelFileError if the model's files do not fit."""
    if not checkpoint.spec.generates or checkpoint.spec.encoder is not None:
        raise ModelFileError(f"{checkpoint.path} is no decoder, which --pooling rank needs; give another --pooling")
    template = tokenizer.templates.get("rerank", TEMPLATE)
    score = next((one for one in checkpoint.unread if one.name == SCORE), None)
    if score is not None and (file := score.file.parent.joinpath(*RERANK_FILE)).is_file():
        template = read_text_file(str(file), f"the template {file}", MAX_TEMPLATE_BYTES)
    if not 0 <= template.find(QUERY) < template.find(DOCUMENT):
        raise ModelFileError(f"{checkpoint.path}: the template rerank must have {QUERY}, then {DOCUMENT}")
    if score is not None:
        return Ranking(template, read_rows(score.source, 0, 1)[0])
    if (rows := _classifier(checkpoint)) is not None:
        return Ranking(template, rows[0] - rows[1])
    yes, no = _tokens(checkpoint, tokenizer)
    head, vocab = checkpoint.tensors[OUTPUT], checkpoint.spec.vocab_size
    if not (yes < vocab and no < vocab):
        raise ModelFileError(f"{checkpoint.path}: the tokens {yes} and {no} must be below {vocab}")
    row = lambda token: read_rows(head, token, token + 1)[0]
    return Ranking(template, np.float32(checkpoint.spec.logit_scale) * (row(yes) - row(no)))


def _classifier(checkpoint: Checkpoint) -> np.ndarray | None:
    """The output layer of a GGUF, float32 (2, hidden). None: its rows are those of the output projection."""
    if checkpoint.format != "gguf":
        return None
    name = f"{checkpoint.metadata['general.architecture']}.classifier.output_labels"
    labels = checkpoint.metadata.get(name, LABELS)
    if list(labels) != LABELS:
        raise ModelFileError(f"{checkpoint.path}: {name} is {str(labels)[:80]}; it must be {LABELS}")
    if (tensor := read_gguf(checkpoint.path).tensors.get(CLASSIFIER)) is None:
        return None
    needed = (len(LABELS), checkpoint.spec.hidden_size)
    if tensor.shape != needed:
        raise ModelFileError(
            f"{checkpoint.path}: tensor {CLASSIFIER!r} has shape {tensor.shape}, but the model needs {needed}"
        )
    return read_rows(tensor.source, 0, len(LABELS))


def _tokens(checkpoint: Checkpoint, tokenizer: Tokenizer) -> tuple[int, int]:
    """The tokens of yes and no."""
    config: dict[str, Any] = {}
    if checkpoint.format != "gguf" and (path := checkpoint.folder.joinpath(*LOGIT_SCORE)).exists():
        config = read_json_object(path)
    fields, found = Fields(config, str(checkpoint.path)), list[int]()
    for label, field in zip(LABELS, ("true_token_id", "false_token_id"), strict=True):
        ids = tokenizer.encode(label, add_special=False)
        if not fields.has(field) and len(ids) != 1:
            raise ModelFileError(f"{checkpoint.path}: {label!r} has {len(ids)} tokens; a reranker needs one")
        found.append(fields.integer(field, *ids[:1], low=0, high=1 << 31))
    return found[0], found[1]
