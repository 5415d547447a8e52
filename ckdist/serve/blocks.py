"""An answer as blocks, one after the other: of reasoning, of text, and one for each call of a tool."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ckdist.serve.parsers.delta import Delta

Kind = Literal["reasoning", "text", "call"]
Moment = Literal["begin", "grow", "end"]


@dataclass
class Block:
    """`text` is what it has so far: for a call its arguments, or the text for a `custom` tool.

    `index` counts the blocks of an answer.
    """

    index: int
    kind: Kind
    name: str = ""
    call_id: str = ""
    text: str = ""
    custom: bool = False


@dataclass
class Blocks:
    """Grows by deltas. `all` has every block so far."""

    all: list[Block] = field(default_factory=list[Block])
    _call: int | None = None  # the number of the call that the last block is
    _open: bool = False

    def take(self, deltas: Iterable[Delta]) -> Iterator[tuple[Moment, Block, str]]:
        """What happens to which block, with the text that it grows by."""
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
        """The last block has ended."""
        if self._open:
            self._open = False
            yield "end", self.all[-1], ""
