"""Folders of tiny encoder-decoders as transformers writes them: golden weights, and a tokenizer of their kind."""

import json
import pathlib
import shutil
import string

import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from tests.support.paths import GOLDEN

VOCAB = 91
LETTERS = string.ascii_lowercase + string.digits + ".,!?"
SPECIAL = {  # in the order of their ids
    "bart": ["<s>", "<pad>", "</s>", "<unk>"],
    "marian": ["</s>", "<pad>", "<unk>"],
    "t5": ["<pad>", "</s>", "<unk>"],
}


def _unigram(special: list[str]) -> tokenizers.Tokenizer:
    """SentencePiece's pieces, as T5 and Marian have them: a text ends with </s>."""
    pieces = [*special, "▁", *LETTERS, *(f"▁{letter}" for letter in LETTERS)]
    pieces = [*pieces, *(f"▁{a}{b}" for a in LETTERS for b in LETTERS)][:VOCAB]
    scored = [(piece, 0.0 if i < len(special) else -2.0 - i / 100) for i, piece in enumerate(pieces)]
    made = tokenizers.Tokenizer(models.Unigram(scored, unk_id=special.index("<unk>")))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    ends = [("</s>", special.index("</s>"))]
    made.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", ends)
    return made


def _byte_level(special: list[str]) -> tokenizers.Tokenizer:
    """BART's: byte-level BPE, a text between <s> and </s>."""
    pieces = [*special, "Ġ", *LETTERS, *(f"Ġ{letter}" for letter in LETTERS), *string.ascii_uppercase][:VOCAB]
    merges = [("Ġ", letter) for letter in LETTERS if f"Ġ{letter}" in pieces]
    made = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return made


def write_translator(folder: pathlib.Path, name: str, changed: dict | None = None) -> tokenizers.Tokenizer:
    """A copy of the golden model of this name in `folder`, with a tokenizer, which is given back.

    `changed`: tensors that stand in place of the golden ones.
    """
    golden = GOLDEN / "encoder_decoders" / name
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(golden / "config.json", folder)
    save_file(load_file(golden / "model.safetensors") | (changed or {}), folder / "model.safetensors")
    special = SPECIAL[name.split("_", maxsplit=1)[0]]
    made = _byte_level(special) if name == "bart" else _unigram(special)
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return made
