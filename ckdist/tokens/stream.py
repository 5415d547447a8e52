"""Decodes a stream of token ids. Every step returns the characters that are complete by now."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckdist.tokens.vocabulary import Vocabulary


class StreamDecoder:
    """Decodes one text. It holds at most three bytes of an unfinished character, so a step's cost depends only on its
    token.

    Args:
        skip_special: Control tokens give no text, except those in `kept`.
    """

    def __init__(self, vocabulary: Vocabulary, skip_special: bool = True, kept: Iterable[int] = ()):
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids.difference(kept) if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_text_start = False

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes. Empty inside a character and for a skipped special token."""
        vocabulary = self._vocabulary
        piece = vocabulary.token_bytes(token_id)
        if token_id == vocabulary.bos_token_id:
            self._at_text_start = vocabulary.strips_prefix_space
        elif self._at_text_start and token_id not in vocabulary.special_ids:
            self._at_text_start = False
            piece = piece[1:] if piece.startswith(b" ") else piece
        return "" if token_id in self._skipped else self._utf8.decode(piece)

    def flush(self) -> str:
        """The rest at the end: U+FFFD for an incomplete character, else nothing."""
        return self._utf8.decode(b"", True)
