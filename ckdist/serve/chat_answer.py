"""Answers of /v1/chat/completions in OpenAI's format, whole and streamed."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ckdist.serve.answer_choice import Piece
from ckdist.serve.chat_message import ChatMessage, ChatParser, call_delta
from ckdist.serve.encoding import each
from ckdist.serve.openai_answer import Source, end_of, events, new_head, usage_event
from ckdist.serve.run import Run
from ckdist.serve.scores import TokenScore
from ckdist.tokens.vocabulary import Vocabulary


class ChatAnswer:
    """One answer while it is generated. `head` has the fields that all its parts share."""

    def __init__(self, run: Run, tokenizer: Vocabulary, source: Source):
        self.run, self.tokenizer, self.work = run, tokenizer, run.work
        self.head = new_head("chat.completion", "chatcmpl", source)
        self._parsers: dict[int, ChatParser] = defaultdict(lambda: ChatParser(self.work.answer))

    async def whole(self) -> dict[str, Any]:
        """Returns the `chat.completion` object."""
        choices = [self._choice(piece) for piece in await self.run.whole()]
        end = {"usage": self.run.usage(), "timings": self.run.timings()}
        return {**self.head, "choices": choices, **self._prompt_ids(), **end}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields `chat.completion.chunk` objects as server-sent events."""
        self.head["object"] = "chat.completion.chunk"
        begun: set[int] = set()
        with self.run as run:
            while pieces := await run.next():
                chunks = []
                for piece in pieces:
                    if piece.choice not in begun:
                        begun.add(piece.choice)
                        first = self._chunk(piece.choice, {"role": "assistant", "content": "", "refusal": None})
                        chunks.append({**first, **self._prompt_ids()})
                    chunks += self._chunks(piece)
                if chunks:
                    yield await events(chunks, run, pieces)
        if self.work.include_usage:
            yield usage_event(self.head, self.run)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        parser, message = self._parsers[piece.choice], ChatMessage()
        message.add(parser.take(piece.text, ended=True))
        return {
            "index": piece.choice,
            "message": message.openai(),
            "logprobs": self._logprobs(piece.scores),
            **self._end(piece, parser),
            **self._token_ids(piece),
        }

    def _chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Returns the chunks of a piece: its deltas and its end. The first delta carries the scores and token ids."""
        parser, ids = self._parsers[piece.choice], self._token_ids(piece)
        deltas = parser.take(piece.text, ended=piece.finish_reason is not None)
        shown = [call_delta(delta) for delta in deltas]
        if not shown and (piece.scores or ids.get("token_ids")):
            shown = [{"content": ""}]
        chunks = []
        for delta in shown:
            more = {} if chunks else {"logprobs": self._logprobs(piece.scores), **ids}
            chunks.append(self._chunk(piece.choice, delta, **more))
        if piece.finish_reason is not None:
            chunks.append(self._chunk(piece.choice, {}, **self._end(piece, parser)))
        return chunks

    def _end(self, piece: Piece, parser: ChatParser) -> dict[str, Any]:
        # The reason is the calls, unless a stop string of the client has cut one off.
        called = parser.calls and piece.finish_reason == "stop"
        if called and not (isinstance(piece.stop_reason, str) and parser.ends_in_call):
            return {**end_of(piece), "finish_reason": "tool_calls"}
        return end_of(piece)

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return {**self.head, "choices": [choice]}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.work.prompt_tokens(0)} if self.work.token_ids else {}

    def _token_ids(self, piece: Piece) -> dict[str, Any]:
        return {"token_ids": piece.tokens} if self.work.token_ids else {}

    def _logprobs(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if not self.work.logprobs:
            return None
        return {"content": each(self._score, scores), "refusal": None}

    def _score(self, item: TokenScore) -> dict[str, Any]:
        top = [self._entry(token, logprob) for token, logprob in item.top]
        return {**self._entry(item.token, item.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        piece = self.tokenizer.token_bytes(token)
        name = f"token_id:{token}" if self.work.names_ids else piece.decode("utf-8", "replace")
        return {"token": name, "logprob": logprob, "bytes": list(piece)}
