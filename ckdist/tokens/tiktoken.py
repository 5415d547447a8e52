"""The byte-level BPE of a file with tiktoken's ranks (`tiktoken.model`), for models whose own tokenizer is code.

That code never runs: the type of the model determines how text is split.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from ckdist.errors import ModelFileError
from ckdist.tokens.pieces import BYTE_ALPHABET
from ckdist.tokens.splits import SPLITS, Split

MAX_RANKS_BYTES = 16 << 20  # Kimi-K2's has 2.8 MB
MAX_PIECE_BYTES = 1024
AGAIN = "fetch the model's files again"
RESERVED = 256  # ids of special tokens, after the ranks
# model_type of config.json -> name in SPLITS
SPLIT_OF_TYPE: dict[str, str] = dict.fromkeys(("kimi_k2", "kimi_k25", "kimi_linear"), "kimi-k2")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) ([0-9]{1,8})")
_LETTERS = {byte: letter for letter, byte in BYTE_ALPHABET.items()}


def split_of_type(model_type: object, path: Path) -> Split:
    """Returns the split for models of this type. Raises ModelFileError for an unknown type."""
    name = SPLIT_OF_TYPE.get(model_type) if isinstance(model_type, str) else None
    if name is None:
        raise ModelFileError(
            f"{path} does not say how text is split, and for models of type {model_type!r:.40} it is not known "
            f"(known: {', '.join(SPLIT_OF_TYPE)}): make a tokenizer.json of it, or take the model's GGUF"
        )
    return SPLITS[name]


def backend_of_ranks(data: bytes, path: Path, split: Split, added: object) -> tokenizers.Tokenizer:
    """Builds the tokenizer of lines "base64 of a token, its rank", followed by 256 special tokens.

    A pair of tokens is joined if the result is a token, the lowest rank first. A word that is a token is not merged.

    Args:
        added: `added_tokens_decoder` of tokenizer_config.json. Ids that it does not name get a reserved token.

    Raises ModelFileError, one line, if the file is damaged.
    """
    ranks = _ranks(data, path)
    texts = {piece: piece.decode("latin-1").translate(_LETTERS) for piece in ranks}
    merges = [(texts[left], texts[right]) for left, right in _pairs(ranks)]
    vocabulary = {texts[piece]: rank for piece, rank in ranks.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    special = _special_tokens(added, len(ranks), path)
    backend.add_tokens(special)
    for token_id, token in enumerate(special, len(ranks)):
        if backend.token_to_id(token.content) != token_id:
            raise ModelFileError(
                f"{path} and tokenizer_config.json have two tokens {token.content!r:.40}, one of them with id "
                f"{token_id}: {AGAIN}"
            )
    return backend


def _ranks(data: bytes, path: Path) -> dict[bytes, int]:
    """Token -> rank, in the order of ranks, which are the ids."""
    lines = data.splitlines()
    count = len(lines)
    pieces: list[bytes] = [b""] * count
    for number, line in enumerate(lines, 1):
        piece, rank = _token(line, path, number)
        if rank >= count or pieces[rank]:
            raise ModelFileError(
                f"{path}, line {number}: rank {rank} is there twice, or not below the number of lines ({count}): "
                f"{AGAIN}"
            )
        pieces[rank] = piece
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    if len(ranks) != count:
        raise ModelFileError(f"{path} has {count} lines and {len(ranks)} different tokens: {AGAIN}")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ModelFileError(f"{path} has no token for {len(missing)} bytes, such as 0x{missing[0]:02x}: {AGAIN}")
    return ranks


def _token(line: bytes, path: Path, number: int) -> tuple[bytes, int]:
    fields = _LINE.fullmatch(line)
    try:
        piece = base64.b64decode(fields[1], validate=True) if fields else b""
    except binascii.Error:
        piece = b""
    if fields is None or not 0 < len(piece) <= MAX_PIECE_BYTES:
        raise ModelFileError(
            f"{path}, line {number}: {line[:40].decode('utf-8', 'replace')!r} is not a token of 1 to "
            f"{MAX_PIECE_BYTES} bytes in base64 and its rank: {AGAIN}"
        )
    return piece, int(fields[2])


def _pairs(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """All pairs of tokens that form a token, by the rank of that token."""
    for piece in ranks:
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in ranks and right in ranks:
                yield left, right


def _special_tokens(added: object, first: int, path: Path) -> list[AddedToken]:
    """The special tokens, whose ids follow the ranks."""
    named: Mapping[Any, Any] = added if isinstance(added, dict) else {}
    tokens = {str(i): AddedToken(f"<|reserved_token_{i}|>", special=True) for i in range(first, first + RESERVED)}
    for key, given in named.items():
        content = given.get("content") if isinstance(given, dict) else None
        if key not in tokens or not isinstance(content, str) or not content:
            raise ModelFileError(
                f"tokenizer_config.json names the token {content!r:.40} with id {key!r:.20}; after {path}'s {first} "
                f"tokens, ids are {first} to {first + RESERVED - 1}: {AGAIN}"
            )
        tokens[key] = AddedToken(content, **{name: given.get(name) is True for name in _FLAGS})
    return list(tokens.values())
