"""What a parser must know of one request's answer: how the model marks its reasoning and its calls of tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckdist.tokens.tool_format import ToolFormat


@dataclass(frozen=True)
class AnswerForm:
    """`think`: the marks around reasoning, none where there is no such thing; `in_thought`: the prompt ends with the
    first. `calls`: how tools are called; None where the request has no tools. `types`: of each tool, JSON's type of
    each parameter. `custom`: tools whose one argument is the text of the call. `most_calls`: later calls are left out.
    `markers`: special tokens that the parser must see.
    `channels`: what the prompt has of an answer in harmony's channels; None where there are none.
    """

    think: tuple[str, str] | None = None
    in_thought: bool = False
    calls: ToolFormat | None = None
    types: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    most_calls: int | None = None
    markers: tuple[int, ...] = ()
    channels: str | None = None
    custom: tuple[str, ...] = ()

    @classmethod
    def from_map(cls, fields: dict[str, Any]) -> AnswerForm:
        """The way back of `dataclasses.asdict`, over msgpack."""
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
