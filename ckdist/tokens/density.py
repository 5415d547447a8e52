"""The fewest tokens that a text can have. With it, a text can be refused by its size before it is tokenised."""

import json
from collections.abc import Sequence
from typing import Any

import tokenizers

from ckdist.tokens.pieces import BYTE_ALPHABET

COMPOSING = 3  # most bytes per byte of NFC: three Hangul letters of 3 bytes each become a syllable of 3
KEEPING_NORMALIZERS = {"Prepend": 1, "NFC": COMPOSING}
KEEPING_SPLITS = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"}


def most_bytes_per_token(backend: tokenizers.Tokenizer, pieces: Sequence[bytes]) -> int | None:
    """Tokens of a text >= its UTF-8 bytes / this: the longest token's bytes times the shrinkage of the normaliser.

    None if a token may stand for any length: a normaliser or split drops characters, or the vocabulary does not cover
    all bytes, so that a run of unknown ones is one token.
    """
    shrinks = _shrinks(_state(backend.normalizer))
    if shrinks is None or not _keeps_all(_state(backend.pre_tokenizer)) or not _reaches_all_bytes(backend):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    return max(1, shrinks * max(map(len, pieces), default=1))


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _shrinks(normalizer: dict[str, Any] | None) -> int | None:
    """Factor of the largest shrinkage of a text, or None if there is no limit."""
    if normalizer is None:
        return 1
    kind = normalizer.get("type")
    if kind == "Sequence":
        total = 1
        for step in normalizer["normalizers"]:
            times = _shrinks(step)
            if times is None:
                return None
            total *= times
        return total
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String")
        return 1 if pattern and len(normalizer["content"]) >= len(pattern) else None
    return KEEPING_NORMALIZERS.get(str(kind))


def _keeps_all(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(map(_keeps_all, pre_tokenizer["pretokenizers"]))
    return kind in KEEPING_SPLITS or (kind in ("Split", "Punctuation") and pre_tokenizer.get("behavior") != "Removed")


def _reaches_all_bytes(backend: tokenizers.Tokenizer) -> bool:
    of_bytes = "ByteLevel" in json.dumps(_state(backend.decoder))
    names = BYTE_ALPHABET if of_bytes else (f"<0x{byte:02X}>" for byte in range(256))
    return all(backend.token_to_id(name) is not None for name in names) and (
        of_bytes or getattr(backend.model, "byte_fallback", False)
    )
