"""Answers in consecutive blocks of reasoning, of text, and of one tool call: Anthropic's, and OpenAI's responses."""

from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ckdist.serve.answer_choice import Piece
from ckdist.serve.chat_message import ChatParser
from ckdist.serve.openai_answer import Source
from ckdist.serve.parsers.delta import Delta
from ckdist.serve.run import Run

Kind = Literal["reasoning", "text", "call"]
Moment = Literal["begin", "grow", "end"]


@dataclass
class Block:
    """One block of an answer."""

    index: int  # number of the block in its answer
    kind: Kind
    name: str = ""
    call_id: str = ""
    text: str = ""  # text so far; of a call its arguments, or the free text of a custom tool
    custom: bool = False  # a call of a tool that takes free text


Change: TypeAlias = tuple[Moment, Block, str]  # the string is the new text


@dataclass
class Blocks:
    """Collects deltas into blocks. `all` holds all blocks so far."""

    all: list[Block] = field(default_factory=list[Block])
    _call: int | None = None  # number of the call in the last block
    _open: bool = False

    def take(self, deltas: Iterable[Delta]) -> Iterator[Change]:
        """Yields each change of a block."""
        for delta in deltas:
            kind: Kind = "call" if delta.call is not None else "reasoning" if delta.reasoning else "text"
            text = delta.arguments if delta.call is not None else delta.reasoning or delta.content
            if not self._open or self.all[-1].kind != kind or self._call != delta.call:
                yield from self.end()
                block = Block(len(self.all), kind, delta.name or "", delta.id or "", custom=delta.custom)
                self.all.append(block)
                self._open, self._call = True, delta.call
                yield "begin", block, ""
            if text:
                self.all[-1].text += text
                yield "grow", self.all[-1], text

    def end(self) -> Iterator[Change]:
        """Ends the last block if it is open, and yields that change."""
        if self._open:
            self._open = False
            yield "end", self.all[-1], ""


class BlockAnswer:
    """One answer while it is generated, in the format of a subclass."""

    def __init__(self, run: Run, source: Source):
        self.run, self.source = run, source
        self._parser, self._blocks = ChatParser(run.work.answer), Blocks()

    def _begin(self) -> list[bytes]:
        """Returns the events before the first block."""
        raise NotImplementedError

    def _change(self, moment: Moment, block: Block, text: str) -> list[bytes]:
        """Returns the events of one change."""
        raise NotImplementedError

    def _finish(self, piece: Piece) -> list[bytes]:
        """Returns the events after the last block."""
        raise NotImplementedError

    async def whole_piece(self) -> Piece:
        """Collects all blocks, and returns the complete text."""
        (piece,) = await self.run.whole()
        for _ in self._changes(piece):
            pass
        return piece

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields server-sent events, each with its name."""
        begun = False
        with self.run as run:
            while pieces := await run.next():
                parts = [] if begun else self._begin()
                begun = True
                for piece in pieces:
                    # Each change is encoded before the next one: the block grows.
                    parts += [event for change in self._changes(piece) for event in self._change(*change)]
                    if piece.finish_reason is not None:
                        parts += self._finish(piece)
                if parts:
                    yield b"".join(parts)

    def _changes(self, piece: Piece) -> Iterator[Change]:
        ended = piece.finish_reason is not None
        yield from self._blocks.take(self._parser.take(piece.text, ended))
        if ended:
            yield from self._blocks.end()
