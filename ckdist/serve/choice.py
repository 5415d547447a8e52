"""One choice of an answer while it grows: its text, ended at stop strings, and the scores of its tokens."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckdist.engine.text import TextStream
from ckdist.serve.requests.prepared import Prepared
from ckdist.serve.scores import EchoedScores, TokenScore, score
from ckdist.tokens.stream import StreamDecoder
from ckdist.tokens.vocabulary import Vocabulary


@dataclass
class Piece:
    """What a choice has grown by. `stop_reason` is the stop string, or the id of the stop token, that ended it; None
    for EOS.
    """

    choice: int
    text: str
    scores: Sequence[TokenScore] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    tokens: list[int] = field(default_factory=list)


class OffsetDecoder:
    """A decoder that knows how many characters it has given: `length`."""

    def __init__(self, decoder: StreamDecoder):
        self._decoder = decoder
        self.length = 0

    def step(self, token: int) -> str:
        """The text that `token` completes."""
        text = self._decoder.step(token)
        self.length += len(text)
        return text

    def flush(self) -> str:
        """What is left at the end."""
        text = self._decoder.flush()
        self.length += len(text)
        return text


class Choice:
    """Grows by the engine's `tokens` messages. Scores wait until all of their token's text is decided on."""

    def __init__(self, number: int, tokenizer: Vocabulary, work: Prepared):
        """Of `work` the stop strings and what else decides about the text; an echoed prompt comes before the choice's
        own text.
        """
        self.number, self.base = number, len(work.texts[number // work.n]) if work.echo else 0
        self.tokens = 0
        self._unstoppable = work.sampling.min_tokens  # so many tokens are not searched for stop strings, as in vLLM
        self._decoder = OffsetDecoder(
            tokenizer.decoder(work.skip_special, work.answer.markers if work.answer is not None else ())
        )
        self._stream = TextStream(self._decoder, work.stops, work.include_stop)
        self._given = 0  # characters given out
        self._waiting: deque[tuple[int, int, TokenScore]] = deque()  # with the begin and end of each token's text
        self.finish_reason: str | None = None

    def take(self, message: dict[str, Any]) -> Piece:
        """The growth that a message brings. Once `finish_reason` is set the choice is complete."""
        text = ""
        tokens, logprobs, taken = message["tokens"], message.get("logprobs"), self.tokens
        for index, token in enumerate(tokens):
            begin = self._decoder.length
            text += (self._decoder if self.tokens < self._unstoppable else self._stream).step(token)
            self.tokens += 1
            if logprobs is not None:
                self._waiting.append((begin, self._decoder.length, score(token, logprobs[index], self.base + begin)))
            if self._stream.stopped is not None:
                break
        stopped = self._stream.stopped is not None
        if stopped:
            self.finish_reason = "stop"
        elif message["finish_reason"] is not None:
            text += self._stream.flush()
            stopped = self._stream.stopped is not None
            self.finish_reason = "stop" if stopped else message["finish_reason"]
        self._given += len(text)
        reason = self._stream.stopped if stopped else message.get("stop_token")
        scores, tokens = self._decided(stopped), tokens[: self.tokens - taken]
        return Piece(self.number, text, scores, self.finish_reason, reason, tokens)

    def _decided(self, stopped: bool) -> list[TokenScore]:
        waiting = self._waiting
        if stopped:
            return [entry for begin, _, entry in waiting if begin < self._given]
        if self.finish_reason is not None:
            return [entry for _, _, entry in waiting]
        scores = []
        while waiting and waiting[0][1] <= self._given:
            scores.append(waiting.popleft()[2])
        return scores


class Growth:
    """Successive pieces of one choice, gathered into one; few objects stay of many pieces."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._scores: Sequence[TokenScore] | None = None  # of the first piece
        self._later: list[TokenScore] = []
        self._tokens: list[int] = []
        self._last: Piece | None = None

    def add(self, piece: Piece) -> None:
        """`piece` is the next of the choice."""
        self._texts.append(piece.text)
        self._tokens.extend(piece.tokens)
        if self._scores is None:
            self._scores = piece.scores
        else:
            self._later.extend(piece.scores)
        self._last = piece

    def piece(self) -> Piece:
        """All that was added, at least one piece."""
        first, last = self._scores, self._last
        assert first is not None and last is not None, "a piece comes after the first `add`"
        scores = first.followed_by(self._later) if isinstance(first, EchoedScores) else [*first, *self._later]
        text = "".join(self._texts)
        return Piece(last.choice, text, scores, last.finish_reason, last.stop_reason, self._tokens)
