"""Scores (log-probabilities) of tokens in an answer.

Each score uses few objects: an answer may have 100,000 of them, and Python's garbage collector stops the event loop
while it scans all objects.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, overload

from ckdist.engine.messages import PromptScores
from ckdist.serve.encoding import TURN_ITEMS, Turns
from ckdist.tokens.stream import StreamDecoder

LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity; OpenAI's clients know this number


class TokenScore:
    """The score of one token and of its alternatives.

    `offset` is the start of the token's text. For the first token of a prompt `logprob` is None and `top` is empty.
    """

    __slots__ = ("_alternatives", "logprob", "offset", "token")

    def __init__(self, token: int, logprob: float | None, top: Iterable[Iterable[Any]], offset: int):
        self.token, self.logprob, self.offset = token, logprob, offset
        self._alternatives = tuple(chain.from_iterable(top))

    @property
    def top(self) -> list[tuple[int, float]]:
        """The most likely tokens at this position, as (token, log-probability)."""
        return list(zip(self._alternatives[::2], self._alternatives[1::2], strict=True))


class EchoedScores(Sequence[TokenScore]):
    """The scores of a prompt, created on access, followed by those of the generated tokens."""

    def __init__(
        self, prompt: Sequence[int], entries: PromptScores, offsets: Sequence[int], following: list[TokenScore]
    ):
        self._prompt, self._entries, self._offsets, self._following = prompt, entries, offsets, following

    def followed_by(self, scores: list[TokenScore]) -> "EchoedScores":
        """Returns a copy with `scores` appended."""
        return EchoedScores(self._prompt, self._entries, self._offsets, [*self._following, *scores])

    def __len__(self) -> int:
        return len(self._prompt) + len(self._following)

    @overload
    def __getitem__(self, index: int) -> TokenScore: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenScore]: ...
    def __getitem__(self, index: int | slice) -> TokenScore | list[TokenScore]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < len(self._prompt):
            return score(self._prompt[index], self._entries[index], self._offsets[index])
        return self._following[index - len(self._prompt)]


def score(token: int, entry: list[Any] | None, offset: int) -> TokenScore:
    """Converts an entry of the engine, with finite numbers. None is the entry of a prompt's first token."""
    if entry is None:
        return TokenScore(token, None, (), offset)
    chosen, top = entry
    return TokenScore(token, _finite(chosen), ((other, _finite(logprob)) for other, logprob in top), offset)


def with_top(entry: Callable[[int, float | None], dict[str, Any]], item: TokenScore) -> dict[str, Any]:
    """Returns a score in an API's format. `entry` makes the object of a token and its log-probability."""
    return {**entry(item.token, item.logprob), "top_logprobs": [entry(token, logprob) for token, logprob in item.top]}


async def score_prompt(
    decoder: StreamDecoder, prompt: Sequence[int], entries: PromptScores, length: int, following: list[TokenScore]
) -> EchoedScores:
    """Returns the scores of a prompt's tokens, followed by `following`. Yields to the event loop in between.

    `decoder` must be a new one. Offsets do not exceed `length`, the characters of the prompt's text. Raises ValueError
    if the engine did not score each token.
    """
    offsets, turns, at = array("Q"), Turns(), 0
    if len(entries) != len(prompt):
        raise ValueError(f"{len(entries)} scores came for a prompt of {len(prompt)} tokens")
    for index, token in enumerate(prompt):
        offsets.append(min(at, length))
        at += len(decoder.step(token))
        if index % TURN_ITEMS == 0:
            await turns.end()
    return EchoedScores(prompt, entries, offsets, following)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
