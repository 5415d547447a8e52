"""The answers of /v1/completions, whole and streamed, in OpenAI's shapes."""

import secrets
import time
from collections.abc import AsyncIterator

from ckdist.serve.answer import event
from ckdist.serve.choice import Piece, TokenScore
from ckdist.serve.run import Run


class CompletionAnswer:
    """One answer under way: the fields that all its parts share."""

    def __init__(self, run: Run, tokenizer, model_name: str):
        self.run, self.tokenizer, self.wants_logprobs = run, tokenizer, run.work.logprobs
        self.head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()), "model": model_name}

    async def whole(self) -> dict:
        """The `text_completion` object; choice `i` continues prompt `i // n`."""
        choices = [self._choice(piece) for piece in await self.run.whole()]
        return {**self.head, "choices": choices, "usage": self.run.usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Chunks as server-sent events."""
        tail = {"usage": None} if self.run.work.include_usage else {}
        with self.run as run:
            while pieces := await run.next():
                yield b"".join([event({**self.head, "choices": [self._choice(piece)], **tail}) for piece in pieces])
        if self.run.work.include_usage:
            yield event({**self.head, "choices": [], "usage": self.run.usage()})

    def _choice(self, piece: Piece) -> dict:
        return {"index": piece.choice, "text": piece.text, "logprobs": self._logprobs(piece.scores), "finish_reason": piece.finish_reason}

    def _logprobs(self, scores: list[TokenScore]) -> dict | None:
        if not self.wants_logprobs:
            return None
        return {
            "tokens": [self._token(item.token) for item in scores],
            "token_logprobs": [item.logprob for item in scores],
            "top_logprobs": [self._top(item) for item in scores],
            "text_offset": [item.offset for item in scores],
        }

    def _top(self, item: TokenScore) -> dict[str, float] | None:
        """The alternatives and the token itself; of tokens with the same text the most likely counts."""
        if item.logprob is None:
            return None
        top: dict[str, float] = {}
        for token, logprob in (*item.top, (item.token, item.logprob)):
            name = self._token(token)
            top[name] = max(logprob, top.get(name, logprob))
        return top

    def _token(self, token: int) -> str:
        """A token as text; one that is no whole UTF-8 is written as OpenAI does, `bytes:\\xe2\\x82`."""
        piece = self.tokenizer.token_bytes(token)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
