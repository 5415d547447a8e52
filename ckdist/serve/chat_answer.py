"""Answers of /v1/chat/completions in OpenAI's format, whole and streamed."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from ckdist.serve.answer_choice import Piece
from ckdist.serve.chat_message import ChatMessage, ChatParser, call_delta
from ckdist.serve.encoding import each
from ckdist.serve.openai_answer import OpenAIAnswer, Source, end_of, new_head
from ckdist.serve.run import Run
from ckdist.serve.scores import TokenScore, with_top
from ckdist.tokens.vocabulary import Vocabulary


class ChatAnswer(OpenAIAnswer):
    """One answer while it is generated."""

    def __init__(self, run: Run, tokenizer: Vocabulary, source: Source):
        head = new_head("chat.completion.chunk" if run.work.stream else "chat.completion", "chatcmpl", source)
        super().__init__(run, tokenizer, head)
        self._parsers: dict[int, ChatParser] = defaultdict(lambda: ChatParser(self.work.answer))

    async def whole(self) -> dict[str, Any]:
        """Returns the `chat.completion` object."""
        return self._whole([self._choice(piece) for piece in await self.run.whole()], **self._prompt_ids(0))

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

    def _chunks(self, piece: Piece, is_first: bool) -> list[dict[str, Any]]:
        """Returns the chunks of a piece: its deltas and its end. The first delta carries the scores and token ids."""
        parser, ids = self._parsers[piece.choice], self._token_ids(piece)
        deltas = parser.take(piece.text, ended=piece.finish_reason is not None)
        shown = [call_delta(delta) for delta in deltas]
        if not shown and (piece.scores or ids.get("token_ids")):
            shown = [{"content": ""}]
        chunks = []
        if is_first:
            role = {"role": "assistant", "content": "", "refusal": None}
            chunks.append({**self._chunk(piece.choice, role), **self._prompt_ids(0)})
        more = {"logprobs": self._logprobs(piece.scores), **ids}
        for delta in shown:
            chunks.append(self._chunk(piece.choice, delta, **more))
            more = {}
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

    def _logprobs(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if not self.work.logprobs:
            return None
        return {"content": each(partial(with_top, self._entry), scores), "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        piece = self.tokenizer.token_bytes(token)
        name = f"token_id:{token}" if self.work.names_ids else piece.decode("utf-8", "replace")
        return {"token": name, "logprob": logprob, "bytes": list(piece)}
