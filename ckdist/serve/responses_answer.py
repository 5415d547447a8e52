"""Answers of OpenAI's /v1/responses, whole and streamed."""

import secrets
import time
from collections.abc import Callable
from typing import Any

from ckdist.serve.answer import named_event
from ckdist.serve.answer_choice import Piece
from ckdist.serve.blocks import Block, BlockAnswer, Moment
from ckdist.serve.openai_answer import Source
from ckdist.serve.run import Run
from ckdist.tokens.vocabulary import Vocabulary

PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}

GROWING = {
    "call": "response.function_call_arguments",
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
}


class ResponsesAnswer(BlockAnswer):
    """One answer while it is generated."""

    def __init__(self, run: Run, _tokenizer: Vocabulary, source: Source, keep: Callable[[dict[str, Any]], None]):
        """`keep` takes the complete answer."""
        super().__init__(run, source)
        self._keep = keep
        self.id, self.created = f"resp_{secrets.token_hex(12)}", int(time.time())
        self._events = 0

    async def whole(self) -> dict[str, Any]:
        """Returns the complete `response` object."""
        return self._response((await self.whole_piece()).finish_reason)

    def _begin(self) -> list[bytes]:
        started = {"response": self._response(None)}
        return [self._event("response.created", started), self._event("response.in_progress", started)]

    def _finish(self, piece: Piece) -> list[bytes]:
        name = "response.incomplete" if piece.finish_reason == "length" else "response.completed"
        return [self._event(name, {"response": self._response(piece.finish_reason)})]

    def _response(self, finish_reason: str | None) -> dict[str, Any]:
        """Returns the `response` object. `finish_reason` is None while the answer grows."""
        cut = finish_reason == "length"
        status = "in_progress" if finish_reason is None else "incomplete" if cut else "completed"
        response = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self.source.model,
            "output": [self._item(block, status) for block in self._blocks.all] if finish_reason else [],
            "usage": self._usage() if finish_reason else None,
            **self.run.work.echoed,
        }
        if finish_reason is not None:
            self._keep(response)
        return response

    def _usage(self) -> dict[str, Any]:
        usage = self.run.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.custom:
            call = {"call_id": block.call_id, "name": block.name, "input": block.text}
            return {**item, "type": "custom_tool_call", **call}
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {**item, "type": "function_call", **call}
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": [_part(block)] if block.text else []}
        return {**item, "type": "message", "role": "assistant", "content": [_part(block)] if block.text else []}

    def _item_id(self, block: Block) -> str:
        prefix = "ctc" if block.custom else PREFIXES[block.kind]
        return f"{prefix}_{self.id.removeprefix('resp_')}{block.index:02d}"

    def _change(self, moment: Moment, block: Block, text: str) -> list[bytes]:
        place = {"output_index": block.index, "item_id": self._item_id(block)}
        part_place = {**place, "content_index": 0}
        growing = "response.custom_tool_call_input" if block.custom else GROWING[block.kind]
        more = {"logprobs": []} if block.kind == "text" else {}
        is_call = block.kind == "call"
        if moment == "grow":
            return [self._event(f"{growing}.delta", {**(place if is_call else part_place), "delta": text, **more})]
        if moment == "begin":
            added = {"output_index": block.index, "item": self._item(block, "in_progress")}
            events = [self._event("response.output_item.added", added)]
            if not is_call:
                events.append(self._event("response.content_part.added", {**part_place, "part": _part(block)}))
            return events
        if is_call:
            told = {"input": block.text} if block.custom else {"name": block.name, "arguments": block.text}
            events = [self._event(f"{growing}.done", {**place, **told})]
        else:
            events = [self._event(f"{growing}.done", {**part_place, "text": block.text, **more})]
            events.append(self._event("response.content_part.done", {**part_place, "part": _part(block)}))
        item = {"output_index": block.index, "item": self._item(block, "completed")}
        return [*events, self._event("response.output_item.done", item)]

    def _event(self, name: str, content: dict[str, Any]) -> bytes:
        self._events += 1
        return named_event({"type": name, "sequence_number": self._events - 1, **content})


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
