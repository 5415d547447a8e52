"""Answers of OpenAI's /v1/responses, whole and streamed."""

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from ckdist.serve.blocks import Block, Blocks, Moment
from ckdist.serve.chat_message import ChatParser
from ckdist.serve.encoding import to_json
from ckdist.serve.openai_answer import Source
from ckdist.serve.run import Run
from ckdist.tokens.vocabulary import Vocabulary

PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}

GROWING = {
    "call": "response.function_call_arguments",
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
}


class ResponsesAnswer:
    """One answer while it is generated."""

    def __init__(
        self, run: Run, _tokenizer: Vocabulary, source: Source, keep: Callable[[dict[str, Any]], None] | None = None
    ):
        """`keep` takes the complete answer."""
        self.run, self.source, self.work, self._keep = run, source, run.work, keep
        self.id, self.created = f"resp_{secrets.token_hex(12)}", int(time.time())
        self._parser, self._blocks = ChatParser(run.work.answer), Blocks()
        self._events = 0

    async def whole(self) -> dict[str, Any]:
        """Returns the complete `response` object."""
        (piece,) = await self.run.whole()
        for _ in self._blocks.take(self._parser.take(piece.text, ended=True)):
            pass
        return self._response(piece.finish_reason)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields OpenAI's server-sent events, each with its name and number."""
        begun = False
        with self.run as run:
            while pieces := await run.next():
                parts = []
                if not begun:
                    begun = True
                    started = {"response": self._response(None)}
                    parts += [self._event("response.created", started), self._event("response.in_progress", started)]
                for piece in pieces:
                    ended = piece.finish_reason is not None
                    parts += self._moments(self._blocks.take(self._parser.take(piece.text, ended)))
                    if ended:
                        parts += self._moments(self._blocks.end())
                        name = "response.incomplete" if piece.finish_reason == "length" else "response.completed"
                        parts.append(self._event(name, {"response": self._response(piece.finish_reason)}))
                if parts:
                    yield b"".join(parts)

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
            **self.work.echoed,
        }
        if finish_reason is not None and self._keep is not None:
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
            return {
                **item,
                "type": "custom_tool_call",
                "call_id": block.call_id,
                "name": block.name,
                "input": block.text,
            }
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {**item, "type": "function_call", **call}
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": [_part(block)] if block.text else []}
        return {**item, "type": "message", "role": "assistant", "content": [_part(block)] if block.text else []}

    def _item_id(self, block: Block) -> str:
        prefix = "ctc" if block.custom else PREFIXES[block.kind]
        return f"{prefix}_{self.id.removeprefix('resp_')}{block.index:02d}"

    def _moments(self, moments: Iterable[tuple[Moment, Block, str]]) -> list[bytes]:
        return [event for moment in moments for event in self._moment(*moment)]

    def _moment(self, moment: Moment, block: Block, text: str) -> list[bytes]:
        """Returns the events for one change of a block."""
        place = {"output_index": block.index, "item_id": self._item_id(block)}
        part_place = {**place, "content_index": 0}
        is_call = block.kind == "call"
        growing = "response.custom_tool_call_input" if block.custom else GROWING[block.kind]
        where = place if is_call else part_place
        if moment == "grow":
            more = {"logprobs": []} if block.kind == "text" else {}
            return [self._event(f"{growing}.delta", {**where, "delta": text, **more})]
        if moment == "begin":
            added = {"output_index": block.index, "item": self._item(block, "in_progress")}
            events = [self._event("response.output_item.added", added)]
            if not is_call:
                events.append(self._event("response.content_part.added", {**part_place, "part": _part(block)}))
            return events
        if is_call:
            told = {"input": block.text} if block.custom else {"name": block.name, "arguments": block.text}
            done = {**place, **told}
            events = [self._event(f"{growing}.done", done)]
        else:
            more = {"logprobs": []} if block.kind == "text" else {}
            events = [self._event(f"{growing}.done", {**part_place, "text": block.text, **more})]
            events.append(self._event("response.content_part.done", {**part_place, "part": _part(block)}))
        item = {"output_index": block.index, "item": self._item(block, "completed")}
        return [*events, self._event("response.output_item.done", item)]

    def _event(self, name: str, content: dict[str, Any]) -> bytes:
        self._events += 1
        data = {"type": name, "sequence_number": self._events - 1, **content}
        return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json(data))


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
