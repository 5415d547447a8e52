"""Deltas: the new parts of a chat's answer, as a client sees them."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Delta:
    """A new part of the content, of the reasoning, or of a tool call."""

    content: str = ""
    reasoning: str = ""
    call: int | None = None  # number of the call; None for content and reasoning
    name: str | None = None  # name of the tool, in the first delta of a call
    arguments: str = ""  # part of the call's arguments, which are JSON once they are complete
    id: str | None = None  # the model's own id of the call, if it writes one
    custom: bool = False  # the call is of a tool that takes free text, which is its arguments


class AnswerParser(Protocol):
    """Parses one answer as its text arrives."""

    def step(self, text: str) -> list[Delta]:
        """Takes the next part of the text. Returns the deltas that are certain by now."""
        ...

    def flush(self) -> list[Delta]:
        """Returns the remaining deltas when the answer has ended."""
        ...


def joined(deltas: list[Delta]) -> list[Delta]:
    """Merges neighbouring deltas of one kind."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if (
            last is not None
            and delta.name is None
            and last.call == delta.call
            and bool(last.reasoning) == bool(delta.reasoning)
        ):
            found[-1] = Delta(
                last.content + delta.content,
                last.reasoning + delta.reasoning,
                last.call,
                last.name,
                last.arguments + delta.arguments,
                last.id,
            )
        else:
            found.append(delta)
    return found
