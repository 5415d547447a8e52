"""The scores of tokens in an answer: few objects for each, since an answer may have 100,000 and Python's garbage
collector stops the event loop for as long as it looks at them all.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, overload

from ckdist.engine.messages import PromptScores
from ckdist.serve.encoding import TURN_ITEMS, Turns
from ckdist.tokens.stream import StreamDecoder

LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity; OpenAI's clients know this number


class TokenScore:
    """`offset` is where the token's text begins; `logprob` is None for the first token of a prompt, `top` then
    empty.
    """

    __slots__ = ("_alternatives", "logprob", "offset", "token")

    def __init__(self, token: int, logprob: float | None, top: Iterable[Iterable[Any]], offset: int):
        self.token, self.logprob, self.offset = token, logprob, offset
        self._alternatives = tuple(chain.from_iterable(top))

    @property
    def top(self) -> list[tuple[int, float]]:
        """The most likely tokens in this one's place, with their log-probabilities."""
        return list(zip(self._alternatives[::2], self._alternatives[1::2], strict=True))


class EchoedScores(Sequence[TokenScore]):
    """The scores of a prompt, each made when it is asked for, and behind them those of the tokens that followed it."""

    def __init__(
        self, prompt: Sequence[int], entries: PromptScores, offsets: Sequence[int], following: list[TokenScore]
    ):
        self._prompt, self._entries, self._offsets, self._following = prompt, entries, offsets, following

    def followed_by(self, scores: list[TokenScore]) -> "EchoedScores":
        """The same with `scores` behind them."""
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
    """A logprobs entry of the engine, with infinities made finite; None is the first token of a prompt."""
    if entry is None:
        return TokenScore(token, None, (), offset)
    chosen, top = entry
    return TokenScore(token, _finite(chosen), ((other, _finite(logprob)) for other, logprob in top), offset)


async def score_prompt(
    decoder: StreamDecoder, prompt: Sequence[int], packed: dict[str, Any], length: int, following: list[TokenScore]
) -> EchoedScores:
    """The prompt's own tokens before `following`, in turns with the loop's other work; `decoder` is a new one, and
    offsets stay within a prompt text of `length` characters. ValueError where the engine did not score each token.
    """
    entries, offsets, turns, at = PromptScores(packed), array("Q"), Turns(), 0
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
