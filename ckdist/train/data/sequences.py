"""Turns of a chat as token sequences, with a mask of the tokens that are learned.

A sequence begins with the tokens that a server computes from the prompt. Turns share a sequence if the later prompt
begins with the tokens of the earlier turn, so that the result is the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding

from ckdist.tokens.tokenizer import Tokenizer
from ckdist.train.data.turns import Span, Turn


class LearnedTokens(NamedTuple):
    """A sequence: its ids, and bool (ids,): the loss is taken on the token."""

    ids: list[int]
    learned: np.ndarray


def encode_turns(chats: Sequence[Sequence[Turn]], tokenizer: Tokenizer) -> Iterator[list[LearnedTokens]]:
    """Yields the sequences of each chat. Tokenises on all cores."""
    texts = [text for turn in chain(*chats) for text in (turn.prompt, turn.prompt + turn.answer)]
    encodings = iter(tokenizer.backend.encode_batch(texts, add_special_tokens=False) if texts else [])
    for chat in chats:
        encoded = [_encode(turn, next(encodings).ids, next(encodings), tokenizer) for turn in chat]
        yield list(_joined(encoded))


def _encode(turn: Turn, prompt: list[int], whole: Encoding, tokenizer: Tokenizer) -> tuple[int, LearnedTokens]:
    """The tokens of one turn, and the number of the prompt's tokens among them."""
    size, begin = len(prompt), len(turn.prompt)
    if whole.ids[:size] == prompt:
        learned = _mask(whole.offsets, [(first + begin, last + begin) for first, last in turn.learned])
        learned[:size] = False
        return size, LearnedTokens(whole.ids, learned)
    # A token of the whole text crosses the boundary. A server's prompt ends there, so the answer is encoded alone.
    (alone,) = tokenizer.backend.encode_batch([turn.answer], add_special_tokens=False)
    learned = np.concatenate([np.zeros(size, bool), _mask(alone.offsets, turn.learned)])
    return size, LearnedTokens([*prompt, *alone.ids], learned)


def _mask(offsets: Sequence[Span], spans: Iterable[Span]) -> np.ndarray:
    begins = np.array([begin for begin, _ in offsets], np.int64)
    learned = np.zeros(len(begins), bool)
    for begin, end in spans:
        learned |= (begins >= begin) & (begins < end)
    return learned


def _joined(turns: Iterable[tuple[int, LearnedTokens]]) -> Iterator[LearnedTokens]:
    """Joins turns that share their beginning. Tokens after the last learned one are dropped."""
    last: LearnedTokens | None = None
    for size, (ids, learned) in turns:
        if last is not None:
            if len(last.ids) <= size and ids[: len(last.ids)] == last.ids:
                learned[: len(last.ids)] |= last.learned
            else:
                yield _trimmed(last)
        last = LearnedTokens(ids, learned)
    if last is not None:
        yield _trimmed(last)


def _trimmed(sequence: LearnedTokens) -> LearnedTokens:
    end = int(np.flatnonzero(sequence.learned)[-1]) + 1 if sequence.learned.any() else 0
    return LearnedTokens(sequence.ids[:end], sequence.learned[:end])
