"""Answers of Ollama's /api/chat, /api/generate and /api/embed: objects, or lines of JSON."""

import time
from collections.abc import AsyncGenerator
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ckdist.serve.answer_choice import Piece
from ckdist.serve.chat_message import ChatParser, parsed_arguments
from ckdist.serve.encoding import to_json
from ckdist.serve.openai_answer import Source
from ckdist.serve.run import Run
from ckdist.serve.scores import TokenScore, with_top
from ckdist.tokens.vocabulary import Vocabulary

if TYPE_CHECKING:
    from ckdist.serve.embedding_run import EmbeddingRun

REASONS = {"tool_calls": "stop", "length": "length"}  # others are "stop"


def moment() -> str:
    """Returns the present as Ollama writes it."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """Returns a duration as Ollama gives it."""
    return int(seconds * 1e9)


class OllamaAnswer:
    """One answer while it is generated. `place` puts a part of it where the kind of request has it."""

    def __init__(self, run: Run, tokenizer: Vocabulary, source: Source):
        self.run, self._tokenizer, self._source = run, tokenizer, source
        self._parser = ChatParser(run.work.answer)
        self._begun = time.monotonic()
        self._call: dict[str, str] | None = None  # the call whose arguments are incomplete

    async def whole(self) -> dict[str, Any]:
        """Returns the complete object."""
        (piece,) = await self.run.whole()
        return {**self._part(piece, ended=True), **self._end(piece)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields lines of JSON."""
        with self.run as run:
            while pieces := await run.next():
                lines = []
                for piece in pieces:
                    ended = piece.finish_reason is not None
                    part = self._part(piece, ended)
                    if not ended and self._says_something(part):
                        lines.append(to_json({**part, "done": False}) + b"\n")
                    elif ended:
                        lines.append(to_json({**part, **self._end(piece)}) + b"\n")
                if lines:
                    yield b"".join(lines)

    def place(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the part of an answer to /api/chat."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        message |= {"thinking": thinking} if thinking else {}
        message |= {"tool_calls": calls} if calls else {}
        return {"message": message}

    def _says_something(self, part: dict[str, Any]) -> bool:
        said = part.get("message", part)
        return bool(said.get("content") or said.get("response") or said.get("thinking") or said.get("tool_calls"))

    def _part(self, piece: Piece, ended: bool) -> dict[str, Any]:
        content, thinking, calls = "", "", list[dict[str, Any]]()
        for delta in self._parser.take(piece.text, ended):
            content += delta.content or ""
            thinking += delta.reasoning or ""
            if delta.name is not None:
                calls += self._finished_call()
                self._call = {"name": delta.name, "arguments": ""}
            if delta.arguments and self._call is not None:
                self._call["arguments"] += delta.arguments
        if ended:
            calls += self._finished_call()
        head = {"model": self._source.model, "created_at": moment()}
        return {**head, **self.place(content, thinking, calls), **self._logprobs(piece)}

    def _finished_call(self) -> list[dict[str, Any]]:
        call, self._call = self._call, None
        if call is None:
            return []
        return [{"function": {"name": call["name"], "arguments": parsed_arguments(call["arguments"])}}]

    def _end(self, piece: Piece) -> dict[str, Any]:
        begin, first, last = self.run.moments() or (self._begun,) * 3
        usage = self.run.usage()
        return {
            "done": True,
            "done_reason": REASONS.get(piece.finish_reason or "", "stop"),
            "total_duration": nanoseconds(time.monotonic() - min(begin, self._begun)),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": nanoseconds(first - begin),
            "eval_count": usage["completion_tokens"],
            "eval_duration": nanoseconds(last - first),
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return {"logprobs": [self._score(item) for item in piece.scores]} if self.run.work.logprobs else {}

    def _score(self, item: TokenScore) -> dict[str, Any]:
        shown = with_top(self._entry, item)
        return shown if shown["top_logprobs"] else self._entry(item.token, item.logprob)

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        piece = self._tokenizer.token_bytes(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}


class OllamaText(OllamaAnswer):
    """An answer to /api/generate."""

    def place(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns a part of the text."""
        del calls  # there are no tools
        return {"response": content, **({"thinking": thinking} if thinking else {})}


async def ollama_vectors(run: "EmbeddingRun", source: Source) -> list[bytes]:
    """Returns the answer to /api/embed."""
    begun = time.monotonic()
    vectors = [vector.tolist() for vector in await run.vectors()]
    taken = {"total_duration": nanoseconds(time.monotonic() - begun), "load_duration": 0}
    return [to_json({"model": source.model, "embeddings": vectors, **taken, "prompt_eval_count": run.prompt_tokens})]


async def ollama_vector(run: "EmbeddingRun", source: Source) -> list[bytes]:
    """Returns the answer to the older /api/embeddings."""
    del source  # this answer does not name the model
    (vector,) = await run.vectors()
    return [to_json({"embedding": vector.tolist()})]
