"""Deltas: the new parts of a chat's answer, as a client sees them."""

from dataclasses import dataclass, replace

from ckdist.serve.parsers.form import AnswerForm
from ckdist.serve.parsers.reader import Parsing, TextReader


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


class AnswerParser:
    """Parses one answer as its text arrives. Subclasses read it from `_reader`, and append to `_deltas`."""

    def __init__(self, form: AnswerForm):
        self._form, self._reader, self._deltas = form, TextReader(), list[Delta]()
        self._parsing = self._answer()

    def _answer(self) -> Parsing[None]:
        """Reads the whole answer."""
        raise NotImplementedError

    def step(self, text: str) -> list[Delta]:
        """Takes the next part of the text. Returns the deltas that are certain by now."""
        self._reader.feed(text)
        next(self._parsing, None)
        deltas, most = joined(self._deltas), self._form.most_calls
        self._deltas.clear()
        return [delta for delta in deltas if most is None or delta.call is None or delta.call < most]

    def flush(self) -> list[Delta]:
        """Returns the remaining deltas when the answer has ended."""
        self._reader.ended = True
        return self.step("")


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
            texts = {name: getattr(last, name) + getattr(delta, name) for name in ("content", "reasoning", "arguments")}
            found[-1] = replace(last, **texts)
        else:
            found.append(delta)
    return found
