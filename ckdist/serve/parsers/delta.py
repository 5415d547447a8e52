"""What a chat's answer has grown by, as a client sees it."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Delta:
    """Some of the `content`, of the `reasoning`, or of call number `call`: its `name`, which comes once and first, or
    some of its `arguments`, which are JSON once they are whole. `id` is the model's own for the call, where it has one.
    `custom`: the call is of a tool that takes free text, which is its arguments.
    """

    content: str = ""
    reasoning: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""
    id: str | None = None
    custom: bool = False


class AnswerParser(Protocol):
    """Follows one answer."""

    def step(self, text: str) -> list[Delta]:
        """What is certain with the next part of the answer's text."""
        ...

    def flush(self) -> list[Delta]:
        """The rest, when the answer has ended."""
        ...


def joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one kind as one."""
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
