"""Control tokens that are plain text in messages: marked before a template renders them, and found in its prompt.

A template is a program that may trim, split, join and compare the text of messages. So the text gets marks that such
programs keep: one character, which occurs nowhere else, inside every text of a control token. A part of such a text at
an end of a string also gets a mark, since a template may join it with others. The marks are removed from the prompt. A
control token's text that had a mark inside is plain text, and all others are the template's own tokens.
"""

import json
import os
import random
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ckdist.errors import RequestError

MARKS = range(0x20000, 0x2A6D0)  # CJK extension B: letters, which no filter of a template changes
DRAWS = 64
SYMBOL = re.compile(r"[^\w\s]")


class RenderedChat(NamedTuple):
    """A prompt, and its spans that read like control tokens and are plain text."""

    text: str
    literal: tuple[tuple[int, int], ...] = ()


class ControlText:
    """The texts of a vocabulary's control tokens, except single characters and white space."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(text for text in texts if len(text) > 1 and not text.isspace())
        self._longest = max(map(len, self.texts), default=0)
        pattern = pattern_of(self.texts)
        self._first, self._every = re.compile(pattern), re.compile(f"(?=({pattern}))")
        # Parts of words are left out: they are too common, and templates compare them.
        symbols = [(text, [found.end() for found in SYMBOL.finditer(text)]) for text in self.texts]
        self._heads = frozenset(text[:cut] for text, at in symbols if at for cut in range(at[0], len(text)))
        self._tails = frozenset(text[cut:] for text, at in symbols if at for cut in range(1, at[-1]))
        self._all = "\n".join(self.texts)
        self._have_symbols = all(SYMBOL.search(text) for text in self.texts)

    def needs_mark(self, value: Any, kept: Collection[str] = ()) -> bool:
        """True if a string in `value` (of JSON's types) needs a mark. Texts in `kept` need none."""
        return bool(self.texts) and any(self._positions(text, kept) for text in strings(value))

    def marked(self, value: Any, mark: str, kept: Collection[str] = ()) -> Any:
        """Returns `value` with marks in its strings, including the keys of maps."""
        if isinstance(value, str):
            cuts = [0, *self._positions(value, kept), len(value)]
            return mark.join(value[begin:end] for begin, end in pairwise(cuts))
        if isinstance(value, Mapping):
            return {self.marked(key, mark, kept): self.marked(item, mark, kept) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.marked(item, mark, kept) for item in value]
        return value

    def without_marks(self, prompt: str, mark: str) -> RenderedChat:
        """Removes the marks. Returns the prompt with the spans that had a mark inside."""
        parts = prompt.replace(_escaped(mark), mark).split(mark)
        text, marks = "".join(parts), list(accumulate(map(len, parts)))[:-1]
        spans = [(found.start(), found.end(1)) for found in self._every.finditer(text)] if marks else []
        inside = lambda span: bisect_right(marks, span[0]) < bisect_right(marks, span[1] - 1)
        return RenderedChat(text, tuple(filter(inside, spans)))

    def _positions(self, text: str, kept: Collection[str]) -> list[int]:
        """Positions of the marks in a string."""
        if self._have_symbols and not SYMBOL.search(text):
            return []
        found, size, most = set[int](), len(text), self._longest
        if self._first.search(text):
            found.update(match.start() + 1 for match in self._every.finditer(text) if match[1] not in kept)
        head, tail = text[: most - 1], text[-most + 1 :]
        if SYMBOL.search(tail):
            found.update(size - n + 1 for n in range(1, len(tail) + 1) if tail[-n:] in self._heads)
        if SYMBOL.search(head):
            found.update(n - 1 for n in range(1, len(head) + 1) if head[:n] in self._tails)
            if size < most and text in self._all:
                found.add(size // 2)
        return sorted(found)


def new_mark(values: Iterable[Any], texts: Iterable[str]) -> str:
    """A character that is in none of `values` and `texts`. Raises RequestError if none is found."""
    there = [*(text for value in values for text in strings(value)), *texts]
    for _ in range(DRAWS):
        mark = chr(random.choice(MARKS))
        if not any(mark in text or _escaped(mark) in text for text in there):
            return mark
    raise RequestError("the messages have too many different characters; send fewer", "messages")


def strings(value: Any) -> Iterator[str]:
    """All strings in `value`, including the keys of maps."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings(item)


def pattern_of(texts: Iterable[str]) -> str:
    """A regular expression for the longest of `texts` at a position.

    It is a trie, so that thousands of texts cost as little as a few.
    """
    texts = set(texts)
    if not texts:
        return r"(?!)"
    common = os.path.commonprefix(list(texts))  # noqa: RUF071 - of texts, not of paths
    rest = {text[len(common) :] for text in texts}
    firsts = sorted({text[0] for text in rest if text})
    branches = [pattern_of(text for text in rest if text[:1] == first) for first in firsts]
    if not branches:
        return re.escape(common)
    return f"{re.escape(common)}(?:{'|'.join(branches)}){'?' if '' in rest else ''}"


def _escaped(mark: str) -> str:
    """The mark in ASCII JSON."""
    return json.dumps(mark)[1:-1]
