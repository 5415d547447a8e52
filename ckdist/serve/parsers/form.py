"""How a model marks reasoning and tool calls in one answer."""

from __future__ import annotations

from msgspec import field

from ckdist.engine.typed_records import Record
from ckdist.tokens.tool_format import ToolFormat


class AnswerForm(Record, frozen=True):
    """The format of one answer, for its parser."""

    think: tuple[str, str] | None = None  # marks around reasoning; None: no reasoning is separated
    in_thought: bool = False  # the prompt ends with the first of these marks
    calls: ToolFormat | None = None  # how tools are called; None if the request has no tools
    # Tool name -> parameter name -> JSON type.
    types: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    most_calls: int | None = None  # later calls are left out
    markers: tuple[int, ...] = ()  # special tokens that the parser must see
    channels: str | None = None  # start of an answer in harmony's channels, from the prompt; None for other formats
    custom: tuple[str, ...] = ()  # tools whose one argument is the text of the call
