"""Answers of /v1/completions in OpenAI's format, whole and streamed."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ckdist.serve.answer_choice import Piece
from ckdist.serve.encoding import each
from ckdist.serve.openai_answer import Source, end_of, events, new_head, usage_event
from ckdist.serve.run import Run
from ckdist.serve.scores import TokenScore
from ckdist.tokens.vocabulary import Vocabulary


class CompletionAnswer:
    """One answer while it is generated. `head` has the fields that all its parts share."""

    def __init__(self, run: Run, tokenizer: Vocabulary, source: Source):
        self.run, self.tokenizer, self.work = run, tokenizer, run.work
        self.head = new_head("text_completion", "cmpl", source)

    async def whole(self) -> dict[str, Any]:
        """Returns the `text_completion` object. Choice `i` continues prompt `i // n`."""
        choices = [{**self._choice(piece), **self._prompt_ids(piece.choice)} for piece in await self.run.whole()]
        return {**self.head, "choices": choices, "usage": self.run.usage(), "timings": self.run.timings()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields chunks as server-sent events."""
        begun: set[int] = set()
        with self.run as run:
            while pieces := await run.next():
                chunks = []
                for piece in pieces:
                    ids = {} if piece.choice in begun else self._prompt_ids(piece.choice)
                    begun.add(piece.choice)
                    chunks.append({**self.head, "choices": [{**self._choice(piece), **ids}]})
                yield await events(chunks, run, pieces)
        if self.work.include_usage:
            yield usage_event(self.head, self.run)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        ids = {"token_ids": piece.tokens} if self.work.token_ids else {}
        scores = self._logprobs(piece.scores)
        return {"index": piece.choice, "text": piece.text, "logprobs": scores, **end_of(piece), **ids}

    def _prompt_ids(self, choice: int) -> dict[str, Any]:
        return {"prompt_token_ids": self.work.prompt_tokens(choice)} if self.work.token_ids else {}

    def _logprobs(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if not self.work.logprobs:
            return None
        return {
            "tokens": each(lambda item: self._token(item.token), scores),
            "token_logprobs": each(lambda item: item.logprob, scores),
            "top_logprobs": each(self._top, scores),
            "text_offset": each(lambda item: item.offset, scores),
        }

    def _top(self, item: TokenScore) -> dict[str, float] | None:
        """The alternatives and the token itself, by text. If tokens have the same text, the most likely counts."""
        if item.logprob is None:
            return None
        top: dict[str, float] = {}
        for token, logprob in (*item.top, (item.token, item.logprob)):
            name = self._token(token)
            top[name] = max(logprob, top.get(name, logprob))
        return top

    def _token(self, token: int) -> str:
        r"""A token as text. Incomplete UTF-8 is written as OpenAI writes it: `bytes:\xe2\x82`."""
        if self.work.names_ids:
            return f"token_id:{token}"
        piece = self.tokenizer.token_bytes(token)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
