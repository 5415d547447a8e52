"""How a model marks reasoning and tool calls in one answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckdist.tokens.tool_format import ToolFormat


@dataclass(frozen=True)
class AnswerForm:
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

    @classmethod
    def from_map(cls, fields: dict[str, Any]) -> AnswerForm:
        """Inverse of `dataclasses.asdict`, after msgpack."""
        think, calls = fields["think"], fields["calls"]
        return cls(
            think=None if think is None else (think[0], think[1]),
            in_thought=fields["in_thought"],
            calls=None if calls is None else ToolFormat(**calls),
            types=fields["types"],
            custom=tuple(fields["custom"]),
            most_calls=fields["most_calls"],
            markers=tuple(fields["markers"]),
            channels=fields["channels"],
        )
