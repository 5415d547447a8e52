"""Answers of Anthropic's /v1/messages, whole and streamed."""

import secrets
from typing import Any

from ckdist.serve.answer import named_event
from ckdist.serve.answer_choice import Piece
from ckdist.serve.blocks import Block, BlockAnswer, Moment
from ckdist.serve.chat_message import parsed_arguments
from ckdist.serve.openai_answer import Source
from ckdist.serve.run import Run
from ckdist.tokens.vocabulary import Vocabulary


class AnthropicAnswer(BlockAnswer):
    """One answer while it is generated."""

    def __init__(self, run: Run, _tokenizer: Vocabulary, source: Source):
        super().__init__(run, source)
        self.id = f"msg_{secrets.token_hex(12)}"

    async def whole(self) -> dict[str, Any]:
        """Returns the complete `message` object."""
        piece = await self.whole_piece()
        content = [_block(block, block.text) for block in self._blocks.all]
        return {**self._message(content), **self._end(piece), "usage": self._usage()}

    def _begin(self) -> list[bytes]:
        start = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return [named_event({"type": "message_start", "message": start})]

    def _finish(self, piece: Piece) -> list[bytes]:
        delta = {"type": "message_delta", "delta": self._end(piece), "usage": self._usage()}
        return [named_event(delta), named_event({"type": "message_stop"})]

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.source.model,
            "content": content,
        }

    def _change(self, moment: Moment, block: Block, text: str) -> list[bytes]:
        if moment == "begin":
            told = {"type": "content_block_start", "index": block.index, "content_block": _block(block, "")}
        elif moment == "end":
            told = {"type": "content_block_stop", "index": block.index}
        else:
            delta = {
                "text": {"type": "text_delta", "text": text},
                "reasoning": {"type": "thinking_delta", "thinking": text},
                "call": {"type": "input_json_delta", "partial_json": text},
            }[block.kind]
            told = {"type": "content_block_delta", "index": block.index, "delta": delta}
        return [named_event(told)]

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


def _block(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": parsed_arguments(text)}
