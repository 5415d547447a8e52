"""The answers of /v1/chat/completions, whole and streamed, in OpenAI's shapes."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ckdist.serve.choice import Piece
from ckdist.serve.encoding import each
from ckdist.serve.openai_answer import Source, end_of, events, new_head, usage_event
from ckdist.serve.run import Run
from ckdist.serve.scores import TokenScore
from ckdist.tokens.vocabulary import Vocabulary


class ChatAnswer:
    """One answer under way: the fields that all its parts share."""

    def __init__(self, run: Run, tokenizer: Vocabulary, source: Source):
        self.run, self.tokenizer, self.work = run, tokenizer, run.work
        self.head = new_head("chat.completion", "chatcmpl", source)

    async def whole(self) -> dict[str, Any]:
        """The `chat.completion` object."""
        choices = [
            {
                "index": piece.choice,
                "message": {"role": "assistant", "content": piece.text, "refusal": None},
                "logprobs": self._logprobs(piece.scores),
                **end_of(piece),
                **self._token_ids(piece),
            }
            for piece in await self.run.whole()
        ]
        end = {"usage": self.run.usage(), "timings": self.run.timings()}
        return {**self.head, "choices": choices, **self._prompt_ids(), **end}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """`chat.completion.chunk` objects as server-sent events."""
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
                    ids = self._token_ids(piece)
                    if piece.text or piece.scores or ids.get("token_ids"):
                        logprobs = self._logprobs(piece.scores)
                        chunks.append(self._chunk(piece.choice, {"content": piece.text}, logprobs=logprobs, **ids))
                    if piece.finish_reason is not None:
                        chunks.append(self._chunk(piece.choice, {}, **end_of(piece)))
                yield await events(chunks, run, pieces)
        if self.work.include_usage:
            yield usage_event(self.head, self.run)

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
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}
