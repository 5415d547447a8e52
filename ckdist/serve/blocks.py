"""Divides an answer into consecutive blocks of reasoning, of text, and of one tool call each."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ckdist.serve.parsers.delta import Delta

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


@dataclass
class Blocks:
    """Collects deltas into blocks. `all` holds all blocks so far."""

    all: list[Block] = field(default_factory=list[Block])
    _call: int | None = None  # number of the call in the last block
    _open: bool = False

    def take(self, deltas: Iterable[Delta]) -> Iterator[tuple[Moment, Block, str]]:
        """Yields (moment, block, new text) for each change of a block."""
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

    def end(self) -> Iterator[tuple[Moment, Block, str]]:
        """Ends the last block if it is open, and yields that change."""
        if self._open:
            self._open = False
            yield "end", self.all[-1], ""
