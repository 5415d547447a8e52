"""The answers of /v1/chat/completions, whole and streamed, in OpenAI's shapes."""

import secrets
import time
from collections.abc import AsyncIterator

from ckdist.serve.answer import event
from ckdist.serve.choice import TokenScore
from ckdist.serve.run import Run


class ChatAnswer:
    """One answer under way: the fields that all its parts share."""

    def __init__(self, run: Run, tokenizer, model_name: str):
        self.run, self.tokenizer, self.wants_logprobs = run, tokenizer, run.work.logprobs
        self.head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": "chat.completion", "created": int(time.time()), "model": model_name}

    async def whole(self) -> dict:
        """The `chat.completion` object."""
        choices = [
            {
                "index": piece.choice,
                "message": {"role": "assistant", "content": piece.text, "refusal": None},
                "logprobs": self._logprobs(piece.scores),
                "finish_reason": piece.finish_reason,
            }
            for piece in await self.run.whole()
        ]
        return {**self.head, "choices": choices, "usage": self.run.usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """`chat.completion.chunk` objects as server-sent events."""
        head = {**self.head, "object": "chat.completion.chunk"}
        tail = {"usage": None} if self.run.work.include_usage else {}
        begun: set[int] = set()
        with self.run as run:
            while pieces := await run.next():
                chunks = []
                for piece in pieces:
                    if piece.choice not in begun:
                        begun.add(piece.choice)
                        chunks.append(_chunk(head, piece.choice, {"role": "assistant", "content": "", "refusal": None}, None, None, tail))
                    if piece.text or piece.scores:
                        chunks.append(_chunk(head, piece.choice, {"content": piece.text}, self._logprobs(piece.scores), None, tail))
                    if piece.finish_reason is not None:
                        chunks.append(_chunk(head, piece.choice, {}, None, piece.finish_reason, tail))
                yield b"".join(chunks)
        if self.run.work.include_usage:
            yield event({**head, "choices": [], "usage": self.run.usage()})

    def _logprobs(self, scores: list[TokenScore]) -> dict | None:
        if not self.wants_logprobs:
            return None
        entries = []
        for item in scores:
            top = [self._entry(token, logprob) for token, logprob in item.top]
            entries.append({**self._entry(item.token, item.logprob), "top_logprobs": top})
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict:
        piece = self.tokenizer.token_bytes(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}


def _chunk(head: dict, index: int, delta: dict, logprobs: dict | None, finish_reason: str | None, tail: dict) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    return event({**head, "choices": [choice], **tail})
