"""Rebuilds the tokenizer of a GGUF file from its metadata (`tokenizer.ggml.*`), as an object of the `tokenizers`
library.

The metadata is a dictionary of keys to Python values. `ckdist.weights` parses the file.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from ckdist.errors import ModelFileError, one_line
from ckdist.tokens.pieces import BYTE_TOKEN, SPACE, byte_level_bytes, sentencepiece_bytes, text_bytes
from ckdist.tokens.scored_merges import scored_merges
from ckdist.tokens.splits import NAMING, Split, split_named
from ckdist.tokens.tokenizer import Tokenizer

MAX_VOCAB = 4 << 20

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Many files name only one end token, though the chat format ends turns with another. These control tokens always end a
# turn. Some files call them user-defined, and then plain text could contain them.
END_OF_TURN = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|return|>", "<|call|>", "<|flush|>",
    "<|calls|>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "[e~[", "<｜end▁of▁sentence｜>",  # noqa: RUF001
}  # fmt: skip
# in a vocabulary with these, <|end|> ends only one of an answer's messages
GOES_ON = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})

# Gemma's and Phi's files call it user-defined, but no text means it. So it is treated like a control token.
NEVER_MEANT = "</s>"

# Kinds that GGUF defines and this module does not read.
NOT_READ = ("hybriddna", "no_vocab", "none", "plamo2", "rwkv", "whitespace")


@dataclass(frozen=True)
class _Vocabulary:
    """The checked arrays of the file, with access to the rules that differ between kinds of vocabulary."""

    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[tuple[str, str]]
    metadata: Mapping[str, Any]

    def flag(self, name: str, default: bool) -> bool:
        """The switch under `name`. Raises ModelFileError if it has another type."""
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, (bool, int)):
            raise ModelFileError(f"tokenizer.ggml.{name} is {value!r:.40}, not true or false")
        return bool(value)

    def token_id(self, name: str, default: int | None = None) -> int | None:
        """The id under `name`. None if it is absent or, as in some files, beyond the vocabulary."""
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(self.tokens)
        return value if known else None

    def of_type(self, *types: int) -> list[int]:
        """The ids of the tokens of these types."""
        return [i for i, kind in enumerate(self.types) if kind in types]


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Builds the tokenizer that `metadata` (GGUF key to value, arrays as lists) describes.

    Kinds: `gpt2` (byte-level BPE), `gemma4` (BPE over text), `llama` (SentencePiece BPE by scores), `t5` (SentencePiece
    unigram), `bert` (WordPiece).

    Raises ModelFileError for another kind, or if arrays are missing or contradict each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    builders = {
        "gpt2": _bpe,
        "gemma4": _bpe,
        "llama": _sentencepiece_bpe,
        "t5": _sentencepiece_unigram,
        "bert": _word_piece,
    }
    if not isinstance(kind, str) or kind not in builders:
        state = "is a kind of vocabulary that ckdist does not read" if kind in NOT_READ else "is not known"
        raise ModelFileError(
            f"tokenizer.ggml.model {kind!r:.40} {state}; known: {', '.join(builders)}; take a model with one of these"
        )
    vocabulary = _read_vocabulary(metadata, kind)
    try:
        return builders[kind](vocabulary)
    except (ModelFileError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in the library is a BaseException
        raise ModelFileError(f"the vocabulary of this file makes no tokenizer: {one_line(error)}") from None


def _read_vocabulary(metadata: Mapping[str, object], kind: str) -> _Vocabulary:
    tokens = _array(metadata, "tokens", str)
    if not 0 < len(tokens) <= MAX_VOCAB:
        raise ModelFileError(f"tokenizer.ggml.tokens has {len(tokens)} entries; a vocabulary has 1 to {MAX_VOCAB}")
    types = _array(metadata, "token_type", int) or [NORMAL] * len(tokens)
    scores = _array(metadata, "scores", float) or [0.0] * len(tokens)
    for name, values in (("token_type", types), ("scores", scores)):
        if len(values) != len(tokens):
            raise ModelFileError(f"tokenizer.ggml.{name} has {len(values)} entries for {len(tokens)} tokens")
    types = [
        CONTROL if kind == USER_DEFINED and token in END_OF_TURN else kind
        for token, kind in zip(tokens, types, strict=True)
    ]
    if not all(map(math.isfinite, scores)):
        raise ModelFileError("tokenizer.ggml.scores has entries that are not finite numbers")
    known, stored, merges = set(tokens), _array(metadata, "merges", str), []
    for index, merge in enumerate(stored):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise ModelFileError(
                f"tokenizer.ggml.merges[{index}] is {merge!r:.60}, not two tokens with one space between"
            )
        if left + right in known:  # a merge into a token that the vocabulary lacks can never apply
            merges.append((left, right))
    if kind in ("gpt2", "gemma4") and not stored and len(tokens) > 512:
        raise ModelFileError(
            f"tokenizer.ggml.merges is missing, though the vocabulary has {len(tokens)} tokens; convert the model again"
        )
    return _Vocabulary(tokens, types, scores, merges, metadata)


def _array(metadata: Mapping[str, object], name: str, kind: type) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}", [])
    if isinstance(values, np.ndarray):  # the reader's form of arrays of numbers
        values = values.tolist()
    accepted = (int, float) if kind is float else kind
    if not isinstance(values, list) or not all(isinstance(value, accepted) for value in values):
        raise ModelFileError(f"tokenizer.ggml.{name} is not an array of {kind.__name__}")
    return values


def _bpe(v: _Vocabulary) -> Tokenizer:
    kind, name = v.metadata["tokenizer.ggml.model"], v.metadata.get("tokenizer.ggml.pre", "")
    if not isinstance(name, str):
        raise ModelFileError(f"tokenizer.ggml.pre is {name!r:.40}, not a name; {NAMING}")
    split = split_named("gemma4" if kind == "gemma4" else name)
    return _visible_space(v, split) if split.visible_space else _byte_level(v, split)


def _byte_level(v: _Vocabulary, split: Split) -> Tokenizer:
    model = models.BPE(vocab=_ids(v.tokens), merges=v.merges, ignore_merges=split.whole_words)
    backend = tokenizers.Tokenizer(model)
    if split.composes:
        backend.normalizer = split.normalizer()
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    _add_special(backend, v, split.mask)
    added = set(v.of_type(CONTROL, USER_DEFINED, UNKNOWN))
    pieces = [text_bytes(token) if i in added else byte_level_bytes(token) for i, token in enumerate(v.tokens)]
    return _finish(
        backend, v, pieces, bos=v.token_id("bos_token_id"), eos=v.token_id("eos_token_id"), adds_bos=split.adds_bos
    )


def _visible_space(v: _Vocabulary, split: Split) -> Tokenizer:
    """BPE by merges over text as in SentencePiece: ▁ for spaces, byte tokens for characters without a token."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=_ids(v.tokens), merges=v.merges, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_special(backend, v)
    if split.adds_bos:  # overrides the file: early conversions of Gemma 4 deny it
        v = replace(v, metadata={**v.metadata, "tokenizer.ggml.add_bos_token": True})
    bos, eos = v.token_id("bos_token_id"), v.token_id("eos_token_id")
    return _finish(backend, v, _sentencepiece_pieces(v), bos, eos, adds_bos=split.adds_bos)


def _word_piece(v: _Vocabulary) -> Tokenizer:
    """BERT's vocabulary: tokens that begin a word begin with ▁, all others do not."""
    special = set(v.of_type(CONTROL, UNKNOWN, USER_DEFINED))
    names = [
        token if i in special else token.removeprefix(SPACE) if token.startswith(SPACE) else f"##{token}"
        for i, token in enumerate(v.tokens)
    ]
    unknown = v.token_id("unknown_token_id", 100)
    if unknown is None:
        raise ModelFileError(
            "tokenizer.ggml.unknown_token_id is missing: WordPiece needs a token for words that it cannot spell"
        )
    backend = tokenizers.Tokenizer(
        models.WordPiece(vocab=_ids(names), unk_token=names[unknown], max_input_chars_per_word=100)
    )
    lowercase = v.flag("normalizer.lowercase", True)
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        lowercase=lowercase,
        strip_accents=v.flag("normalizer.strip_accents", lowercase),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    _add_special(backend, v)
    pieces = [text_bytes(token if i in special else token.replace(SPACE, " ")) for i, token in enumerate(v.tokens)]
    bos, end = v.token_id("bos_token_id", v.token_id("cls_token_id", 101)), v.token_id("seperator_token_id", 102)
    return _finish(backend, v, pieces, bos, end, adds_bos=True, adds_eos=True, strips_prefix_space=True)


def _sentencepiece_bpe(v: _Vocabulary) -> Tokenizer:
    unknown = v.token_id("unknown_token_id", 0)
    has_bytes, ids = BYTE in v.types, _ids(v.tokens)
    model = models.BPE(
        vocab=ids,
        merges=scored_merges({v.tokens[i]: v.scores[i] for i in v.of_type(NORMAL)}, ids),
        unk_token=v.tokens[unknown or 0],
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    return _sentencepiece(
        tokenizers.Tokenizer(model),
        v,
        bos=v.token_id("bos_token_id", 1),
        eos=v.token_id("eos_token_id", 2),
        adds_bos=True,
    )


def _sentencepiece_unigram(v: _Vocabulary) -> Tokenizer:
    unknown = v.token_id("unknown_token_id", 2)
    # Only these may be found in text. A score of -1e9 keeps the ids of the others out of every best path.
    findable = {NORMAL, USER_DEFINED}
    scored = [
        (token, float(score) if kind in findable else -1e9)
        for token, score, kind in zip(v.tokens, v.scores, v.types, strict=True)
    ]
    model = models.Unigram(scored, unk_id=unknown, byte_fallback=BYTE in v.types)
    return _sentencepiece(
        tokenizers.Tokenizer(model), v, bos=v.token_id("bos_token_id"), eos=v.token_id("eos_token_id", 1), adds_eos=True
    )


def _sentencepiece(
    backend: tokenizers.Tokenizer,
    v: _Vocabulary,
    bos: int | None,
    eos: int | None,
    adds_bos: bool = False,
    adds_eos: bool = False,
) -> Tokenizer:
    adds_space = v.flag("add_space_prefix", True)
    charsmap = v.metadata.get("tokenizer.ggml.precompiled_charsmap")
    # A list or array of bytes, which are signed in some files.
    steps = (
        [normalizers.Precompiled(bytes(int(byte) & 255 for byte in charsmap))]
        if charsmap is not None and len(charsmap)
        else []
    )
    if v.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend(SPACE)] if adds_space else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_special(backend, v)
    return _finish(backend, v, _sentencepiece_pieces(v), bos, eos, adds_bos, adds_eos, strips_prefix_space=adds_space)


def _sentencepiece_pieces(v: _Vocabulary) -> list[bytes]:
    is_byte = set(v.of_type(BYTE))
    return [
        sentencepiece_bytes(token) if i in is_byte or not BYTE_TOKEN.fullmatch(token) else text_bytes(token)
        for i, token in enumerate(v.tokens)
    ]


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: i for i, token in reversed(list(enumerate(tokens)))}  # the first of two equal tokens counts


def _add_special(backend: tokenizers.Tokenizer, v: _Vocabulary, mask: str = "") -> None:
    """Adds control tokens and user-defined ones, which are found whole in a text before anything is split.

    The token `mask` also takes the spaces before it.
    """
    control, user = (
        [v.tokens[i] for i in v.of_type(*types) if v.tokens[i]] for types in ((CONTROL, UNKNOWN), (USER_DEFINED,))
    )
    control += [name for name in user if name == NEVER_MEANT]
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False, lstrip=name == mask) for name in control]
    )
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in user if name != NEVER_MEANT])


def _finish(
    backend: tokenizers.Tokenizer,
    v: _Vocabulary,
    pieces: list[bytes],
    bos: int | None,
    eos: int | None,
    adds_bos: bool,
    adds_eos: bool = False,
    strips_prefix_space: bool = False,
) -> Tokenizer:
    control = v.of_type(CONTROL, UNKNOWN)
    ending = END_OF_TURN - {"<|end|>"} if any(names.issubset(v.tokens) for names in GOES_ON) else END_OF_TURN
    ends = {eos, v.token_id("eot_token_id"), v.token_id("eom_token_id")} | {i for i in control if v.tokens[i] in ending}
    named = {
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": v.token_id("unknown_token_id"),
        "pad_token": v.token_id("padding_token_id"),
    }
    return Tokenizer(
        backend=backend,
        pieces=pieces,
        special_ids=frozenset(control),
        prefix=(bos,) if bos is not None and v.flag("add_bos_token", adds_bos) else (),
        suffix=(eos,) if eos is not None and v.flag("add_eos_token", adds_eos) else (),
        bos_token_id=bos,
        eos_token_ids=frozenset(token for token in ends if token is not None),
        strips_prefix_space=strips_prefix_space,
        templates=_chat_templates(v.metadata),
        special_texts={name: v.tokens[i] for name, i in named.items() if i is not None},
    )


def _chat_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    names = {prefix: "default"} | {key: key[len(prefix) + 1 :] for key in metadata if key.startswith(prefix + ".")}
    return {name: text for key, name in names.items() if isinstance(text := metadata.get(key), str)}
