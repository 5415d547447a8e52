"""Lark of an answer that is free until a call of a tool begins in it."""

from collections.abc import Callable

from ckdist.tokens.grammar import quoted
from ckdist.tokens.tool_format import NAME_KEYS, PYTHON_TAG, ToolFormat

Literal = Callable[[str], str]  # a text as Lark, with its control tokens as such

ANY = "/(?s:.*)/"


class TextBeforeCalls:
    """`start` is what an answer begins with, where the rule `calls` stands for its calls, from behind the mark that
    begins them. `rules` are those that it names, `rest` is what such a mark lacks of what stands before a call.
    """

    def __init__(self, form: ToolFormat, literal: Literal, names: tuple[str, ...], think: tuple[str, str] | None):
        """`names` of the tools; `think`: the marks around reasoning, which may come first and holds no calls."""
        opening = (form.section_begin + form.call_begin).lstrip()
        mark = next(iter(opening.split()), "")
        self.rest = opening[len(mark) :]
        self._literal, self._think = literal, think
        self.rules = self._bare(form, names) if not mark else self._marked(mark)
        self.start = "body" if think is None else "thinking? body"
        if think is not None:
            self.rules += self._thinking(*think)

    def _marked(self, mark: str) -> list[str]:
        """The mark begins calls wherever it stands."""
        shown = self._literal(mark)
        if shown == quoted(mark):
            return [
                "body: opening calls | TEXT",
                "opening[lazy]: OPENING",
                f"OPENED: {ANY} {shown}",
                f"OPENING: OPENED{self._not_thinking}",
                f"TEXT: {ANY}{self._not_thinking}",
            ]
        return [
            f"body: TEXT ({shown} calls)?",
            f"MARKED: {ANY} {quoted(mark)} {ANY}",  # by its letters, which would be read as the token is
            f"TEXT: {ANY} & ~MARKED{self._not_thinking}",
        ]

    def _bare(self, form: ToolFormat, names: tuple[str, ...]) -> list[str]:
        """A call is an answer that begins with a brace and names a tool."""
        tag = f"({self._literal(PYTHON_TAG)})? " if form.kind == "llama3" else ""
        keys = " | ".join(quoted(f'"{key}"') for key in dict.fromkeys((form.name_key, *NAME_KEYS)))
        return [
            f"body: {tag}calls | TEXT",
            f"KEY: {keys}",
            "NAME: " + " | ".join(quoted(f'"{name}"') for name in names),
            f"CALLED: /\\s*\\{{(?s:.*)/ KEY /\\s*:\\s*/ NAME {ANY}",
            f"TAGGED: {ANY} {quoted(PYTHON_TAG)} {ANY}",
            f"TEXT: {ANY} & ~CALLED{' & ~TAGGED' if tag else ''}{self._not_thinking}",
        ]

    @property
    def _not_thinking(self) -> str:
        return "" if self._think is None else " & ~THOUGHTFUL"

    def _thinking(self, begin: str, end: str) -> list[str]:
        shown, mark = self._literal(begin), self._literal(end)
        first = "THINKS" if shown == quoted(begin) else shown
        return [
            f"thinking: {first} thoughts",
            f"THINKS: /\\s*/ {quoted(begin)}",
            f"THOUGHTFUL: /\\s*/ {quoted(begin)} {ANY}",
            *thought_rules("thoughts", mark),
        ]


def thought_rules(name: str, mark: str) -> list[str]:
    """Lark of a text that ends with `mark`, itself Lark: a string or a control token."""
    if mark.startswith('"'):
        return [f"{name}[suffix={mark}]: {ANY}"]
    return [f"{name}: {ANY} {mark}"]
