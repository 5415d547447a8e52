"""Answers of /v1/completions in OpenAI's format, whole and streamed."""

from collections.abc import Sequence
from typing import Any

from ckdist.serve.answer_choice import Piece
from ckdist.serve.encoding import each
from ckdist.serve.openai_answer import OpenAIAnswer, Source, end_of, new_head
from ckdist.serve.run import Run
from ckdist.serve.scores import TokenScore
from ckdist.tokens.vocabulary import Vocabulary


class CompletionAnswer(OpenAIAnswer):
    """One answer while it is generated."""

    def __init__(self, run: Run, tokenizer: Vocabulary, source: Source):
        super().__init__(run, tokenizer, new_head("text_completion", "cmpl", source))

    async def whole(self) -> dict[str, Any]:
        """Returns the `text_completion` object. Choice `i` continues prompt `i // n`."""
        return self._whole([self._choice(piece, True) for piece in await self.run.whole()])

    def _chunks(self, piece: Piece, is_first: bool) -> list[dict[str, Any]]:
        return [{**self.head, "choices": [self._choice(piece, is_first)]}]

    def _choice(self, piece: Piece, is_first: bool) -> dict[str, Any]:
        ids = {**self._token_ids(piece), **(self._prompt_ids(piece.choice) if is_first else {})}
        scores = self._logprobs(piece.scores)
        return {"index": piece.choice, "text": piece.text, "logprobs": scores, **end_of(piece), **ids}

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
