"""Answers of Anthropic's /v1/messages, whole and streamed."""

import json
import secrets
from collections.abc import AsyncGenerator
from typing import Any

from ckdist.serve.answer_choice import Piece
from ckdist.serve.blocks import Block, Blocks, Moment
from ckdist.serve.chat_message import ChatParser
from ckdist.serve.encoding import to_json
from ckdist.serve.openai_answer import Source
from ckdist.serve.run import Run
from ckdist.tokens.vocabulary import Vocabulary


class AnthropicAnswer:
    """One answer while it is generated."""

    def __init__(self, run: Run, _tokenizer: Vocabulary, source: Source):
        self.run, self.source, self.work = run, source, run.work
        self.id = f"msg_{secrets.token_hex(12)}"
        self._parser, self._blocks = ChatParser(run.work.answer), Blocks()

    async def whole(self) -> dict[str, Any]:
        """Returns the complete `message` object."""
        (piece,) = await self.run.whole()
        for _ in self._blocks.take(self._parser.take(piece.text, ended=True)):
            pass
        content = [_block(block, whole=True) for block in self._blocks.all]
        return {**self._message(content), **self._end(piece), "usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields Anthropic's server-sent events, each with its name."""
        begun = False
        with self.run as run:
            while pieces := await run.next():
                parts = []
                if not begun:
                    begun = True
                    start = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
                    parts.append(_event("message_start", {"message": start}))
                for piece in pieces:
                    ended = piece.finish_reason is not None
                    moments = [*self._blocks.take(self._parser.take(piece.text, ended))]
                    moments += self._blocks.end() if ended else []
                    parts += [_block_event(*moment) for moment in moments]
                    if ended:
                        parts.append(_event("message_delta", {"delta": self._end(piece), "usage": self._usage()}))
                        parts.append(_event("message_stop", {}))
                if parts:
                    yield b"".join(parts)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.source.model,
            "content": content,
        }

    def _end(self, piece: Piece) -> dict[str, Any]:
        # A stop token has its id as the reason; only a stop string is the client's own.
        stopped_by = piece.stop_reason if isinstance(piece.stop_reason, str) else None
        if piece.finish_reason == "length":
            reason = "max_tokens"
        elif stopped_by is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._parser.calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stopped_by}

    def _usage(self) -> dict[str, Any]:
        usage = self.run.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _block(block: Block, whole: bool) -> dict[str, Any]:
    """Returns a content block. Its text is empty unless `whole`."""
    text = block.text if whole else ""
    if block.kind == "text":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(text)}


def _input(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {"partial_json": arguments}  # arguments that were cut off, as text


def _block_event(moment: Moment, block: Block, text: str) -> bytes:
    if moment == "begin":
        return _event("content_block_start", {"index": block.index, "content_block": _block(block, whole=False)})
    if moment == "end":
        return _event("content_block_stop", {"index": block.index})
    delta = {
        "text": {"type": "text_delta", "text": text},
        "reasoning": {"type": "thinking_delta", "thinking": text},
        "call": {"type": "input_json_delta", "partial_json": text},
    }[block.kind]
    return _event("content_block_delta", {"index": block.index, "delta": delta})


def _event(name: str, content: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json({"type": name, **content}))
