"""Tokenises text in which control tokens are plain text, everywhere or in spans."""

import random
import re
from collections.abc import Collection

import tokenizers
from tokenizers import AddedToken

from ckdist.errors import RequestError
from ckdist.tokens.control_text import pattern_of

SPELLINGS = range(0x12000, 0x12380)  # cuneiform: letters that normalisers keep
SECRET_CHARACTERS = 8


class LiteralText:
    """A tokenizer that shares the vocabulary of `backend`, in which control tokens have secret spellings.

    So text that reads like a control token is plain text, and a control token is written by its secret spelling.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._backend.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._backend.pre_tokenizer = backend.pre_tokenizer
        added = backend.get_added_tokens_decoder()
        self._controls = {token_id: token.content for token_id, token in added.items() if token.special}
        self._secret = "".join(random.SystemRandom().choices([chr(code) for code in SPELLINGS], k=SECRET_CHARACTERS))
        self._spellings = {text: self._secret + _digits(token_id) for token_id, text in self._controls.items()}
        self._backend.add_tokens(
            [self._respelled(added[token_id]) for token_id in sorted(added) if added[token_id].content]
        )
        names = {self._spellings.get(token.content, token.content): token_id for token_id, token in added.items()}
        self._ids = {self._backend.token_to_id(name): token_id for name, token_id in names.items()}
        self._pattern = re.compile(pattern_of(text for text in self._spellings if text))

    def encode(self, text: str, literal: Collection[tuple[int, int]] | None = None) -> list[int]:
        """The ids of `text`. Control tokens are plain text in the spans `literal`; None: everywhere."""
        if self._secret in text:
            raise RequestError("the text has a spelling that is reserved")
        if literal is not None:
            text = self._with_tokens(text, {begin for begin, _ in literal})
        ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not self._controls.keys().isdisjoint(ids):  # some models can merge text to whole control tokens
            ids = [part for token_id in ids for part in self._pieces(token_id)]
        return [self._ids.get(token_id, token_id) for token_id in ids]

    def _with_tokens(self, text: str, literal: Collection[int]) -> str:
        """Replaces all control tokens by their secret spellings, except those that begin at `literal`."""
        parts, begin, at = list[str](), 0, 0
        while found := self._pattern.search(text, at):
            if found.start() in literal:
                at = found.start() + 1
                continue
            parts += [text[begin : found.start()], self._spellings[found[0]]]
            begin = at = found.end()
        return "".join([*parts, text[begin:]])

    def _pieces(self, token_id: int) -> list[int]:
        """The ids of a token that the model has found in text. A control token is divided in two, as text."""
        if token_id not in self._controls or token_id in self._ids:
            return [token_id]
        text = self._controls[token_id]
        return [piece.id for part in (text[:1], text[1:]) for piece in self._backend.model.tokenize(part)]

    def _respelled(self, token: AddedToken) -> AddedToken:
        if token.content not in self._spellings:
            return token
        sides = {"lstrip": token.lstrip, "rstrip": token.rstrip, "normalized": token.normalized}
        return AddedToken(self._spellings[token.content], special=True, **sides)


def _digits(number: int) -> str:
    """`number` in a fixed number of letters, so that no spelling begins another one."""
    letters, base = "", len(SPELLINGS)
    for _ in range(3):
        number, digit = divmod(number, base)
        letters += chr(SPELLINGS[digit])
    return letters
