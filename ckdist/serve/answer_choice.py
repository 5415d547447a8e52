"""One choice of an answer while it is generated: its text up to a stop string, and the scores of its tokens."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckdist.engine.messages import Tokens
from ckdist.engine.text import TextStream
from ckdist.serve.scores import EchoedScores, TokenScore, score
from ckdist.serve.text_records import Prepared
from ckdist.tokens.stream import StreamDecoder
from ckdist.tokens.vocabulary import Vocabulary


@dataclass
class Piece:
    """A new part of a choice."""

    choice: int
    text: str
    scores: Sequence[TokenScore] = ()
    finish_reason: str | None = None
    # The stop string, or id of the stop token, that ended the choice; None for EOS.
    stop_reason: str | int | None = None
    tokens: list[int] = field(default_factory=list)


class OffsetDecoder(StreamDecoder):
    """A decoder that counts the characters it has returned in `length`."""

    length = 0

    def step(self, token_id: int) -> str:
        text = super().step(token_id)
        self.length += len(text)
        return text

    def flush(self) -> str:
        text = super().flush()
        self.length += len(text)
        return text


class Choice:
    """Consumes the engine's `tokens` messages.

    A score is held back until all text of its token is returned, since a stop string may still cut that text off.
    """

    def __init__(self, number: int, tokenizer: Vocabulary, work: Prepared):
        # `base`: characters of an echoed prompt, which precedes the choice's own text.
        self.number, self.base = number, len(work.texts[number // work.n]) if work.echo else 0
        self.tokens = 0
        self._unstoppable = work.sampling.min_tokens  # the first tokens are not searched for stop strings, as in vLLM
        kept = work.answer.markers if work.answer is not None else ()
        self._decoder = OffsetDecoder(tokenizer, work.skip_special, kept)
        self._stream = TextStream(self._decoder, work.stops, work.include_stop)
        self._given = 0  # characters returned so far
        self._waiting: deque[tuple[int, int, TokenScore]] = deque()  # (begin, end of the token's text, score)
        self.finish_reason: str | None = None

    def take(self, message: Tokens) -> Piece:
        """Returns the new part of the choice. The choice is complete once `finish_reason` is set."""
        text = ""
        tokens, logprobs, taken = message.tokens, message.logprobs, self.tokens
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
        elif message.finish_reason is not None:
            text += self._stream.flush()
            stopped = self._stream.stopped is not None
            self.finish_reason = "stop" if stopped else message.finish_reason
        self._given += len(text)
        reason = self._stream.stopped if stopped else message.stop_token
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
    """Joins successive pieces of one choice. Many pieces leave few objects."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._scores: Sequence[TokenScore] | None = None  # of the first piece
        self._later: list[TokenScore] = []
        self._tokens: list[int] = []
        self._last: Piece | None = None

    def add(self, piece: Piece) -> None:
        """Appends the next piece of the choice."""
        self._texts.append(piece.text)
        self._tokens.extend(piece.tokens)
        if self._scores is None:
            self._scores = piece.scores
        else:
            self._later.extend(piece.scores)
        self._last = piece

    def piece(self) -> Piece:
        """Returns all added pieces as one. There must be at least one."""
        first, last = self._scores, self._last
        assert first is not None and last is not None, "a piece comes after the first `add`"
        scores = first.followed_by(self._later) if isinstance(first, EchoedScores) else [*first, *self._later]
        text = "".join(self._texts)
        return Piece(last.choice, text, scores, last.finish_reason, last.stop_reason, self._tokens)
