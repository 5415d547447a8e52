"""Writes a Hugging Face folder's tokenizer as GGUF metadata (`tokenizer.ggml.*`), the inverse of
`tokens.tokenizer_from_gguf`.

GGUF names how a text is split but does not describe it, so the name is found by trying. The tokenizer that is read back
from the metadata must give the same ids for varied text. Otherwise it is an error.
"""

import json
from pathlib import Path
from typing import Any

from ckdist.errors import ModelFileError
from ckdist.tokens.pieces import BYTE_TOKEN
from ckdist.tokens.splits import SPLITS
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.tokens.tokenizer_from_gguf import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, tokenizer_from_gguf
from ckdist.tokens.tried import load_tried

PROBES = (
    "Hello world, it's THE 3rd test: 1234567890 x86_64 (a+b)==c; don't, I'LL, we've",
    "def f(x):\n    return x**2  # two  spaces\n\n\n\tif not\ttabs:   pass   \r\n end ",
    "naïve café — “quotes” … 你好,世界 こんにちは 한국어 русский текст العربية हिन्दी ไทย 🙂🚀 e\u0301",
    "    leading\n  CamelCaseWords snake_case_words 1,000.50 0xFF 12 123 1234 12345 ½ ² ___ !!! ??? \u00a0nbsp",
)


def tokenizer_metadata(folder: Path, vocab_size: int) -> dict[str, object]:
    """The GGUF keys of the tokenizer in `folder`, for a model of `vocab_size` rows.

    Raises ModelFileError if GGUF cannot express the tokenizer.
    """
    tokenizer = load_tried(folder)
    described = json.loads(tokenizer.backend.to_str())
    model = described["model"]
    if model["type"] != "BPE":
        raise ModelFileError(
            f"{folder / 'tokenizer.json'} is a {model['type']} tokenizer; only BPE can be written as GGUF"
        )
    byte_level = not model.get("byte_fallback")
    tokens, types = _tokens(tokenizer, vocab_size, described, byte_level)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    metadata: dict[str, object] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in _special(tokenizer).items()}
    if "default" in tokenizer.templates:
        metadata["tokenizer.chat_template"] = tokenizer.templates["default"]
    if byte_level:
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "",
            **metadata,
            "tokenizer.ggml.merges": merges,
        }
        return metadata | {
            "tokenizer.ggml.pre": _split_name(tokenizer, metadata, bool(model.get("ignore_merges")), folder)
        }
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", **metadata}
    metadata["tokenizer.ggml.scores"] = _scores(tokens, merges)
    metadata["tokenizer.ggml.add_space_prefix"] = tokenizer.strips_prefix_space
    if not _agree(tokenizer, metadata):
        raise ModelFileError(
            f"{folder / 'tokenizer.json'} cannot be written as GGUF: read back, it would give other ids"
        )
    return metadata


def _tokens(
    tokenizer: Tokenizer, vocab_size: int, described: dict[str, Any], byte_level: bool
) -> tuple[list[str], list[int]]:
    """Texts and types of all rows. Rows beyond the vocabulary are unused."""
    if tokenizer.vocab_size > vocab_size:
        raise ModelFileError(f"the tokenizer has {tokenizer.vocab_size} tokens, and the model {vocab_size}")
    tokens, types = [f"[PAD{i}]" for i in range(vocab_size)], [UNUSED] * vocab_size
    for text, token_id in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        tokens[token_id] = text
        types[token_id] = BYTE if not byte_level and BYTE_TOKEN.fullmatch(text) else NORMAL
    for token in described.get("added_tokens", []):
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    unknown = described["model"].get("unk_token")
    if unknown and not byte_level and unknown in tokens:
        types[tokens.index(unknown)] = UNKNOWN
    return tokens, types


def _special(tokenizer: Tokenizer) -> dict[str, object]:
    bos, ends = tokenizer.bos_token_id, sorted(tokenizer.eos_token_ids)
    values: dict[str, object] = {"add_bos_token": bool(tokenizer.prefix), "add_eos_token": bool(tokenizer.suffix)}
    if bos is not None:
        values["bos_token_id"] = bos
    if ends:
        values["eos_token_id"] = ends[0]
    if len(ends) > 1:
        values["eot_token_id"] = ends[-1]
    return values


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """SentencePiece joins by score: the sooner a token is merged, the higher its score."""
    scores = dict.fromkeys(tokens, -1e6)
    for rank, merge in reversed(list(enumerate(merges))):
        scores[merge.replace(" ", "", 1)] = -float(rank)
    return [float(scores[token]) for token in tokens]


def _split_name(tokenizer: Tokenizer, metadata: dict[str, object], whole_words: bool, folder: Path) -> str:
    """The first name under which the metadata gives the tokenizer's ids.

    Splits with the same patterns are tried first, and among these the ones with the same treatment of whole words.
    """
    names = {}
    for name, split in SPLITS.items():
        if not split.visible_space:
            names.setdefault(split, name)
    patterns = _patterns(tokenizer)
    unlike = lambda split: (split.patterns != patterns, split.whole_words != whole_words)
    for _, name in sorted(names.items(), key=lambda item: unlike(item[0])):
        if _agree(tokenizer, metadata | {"tokenizer.ggml.pre": name}):
            return name
    raise ModelFileError(
        f"{folder / 'tokenizer.json'} splits text in a way that GGUF has no name for; "
        f"known: {', '.join(names.values())}"
    )


def _patterns(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The regular expressions that split a text, in their order."""
    own = tokenizer.backend.pre_tokenizer
    state = json.loads(own.__getstate__()) if own is not None else {}
    patterns = [step.get("pattern") for step in state.get("pretokenizers", [state])]
    return tuple(pattern["Regex"] for pattern in patterns if isinstance(pattern, dict) and "Regex" in pattern)


def _agree(tokenizer: Tokenizer, metadata: dict[str, object]) -> bool:
    again = tokenizer_from_gguf(metadata)
    return all(again.encode(probe) == tokenizer.encode(probe) for probe in PROBES)
