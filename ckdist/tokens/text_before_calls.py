"""A Lark grammar of an answer that is free text until a tool call begins."""

from collections.abc import Callable

from ckdist.tokens.grammar import quoted
from ckdist.tokens.tool_format import NAME_KEYS, PYTHON_TAG, ToolFormat

Literal = Callable[[str], str]  # converts a text to Lark, with control tokens as tokens

ANY = "/(?s:.*)/"


class TextBeforeCalls:
    """The rules of free text before tool calls.

    Args:
        names: Names of the tools.
        think: Marks around reasoning, which may come first and holds no calls.
        budget: Most tokens of reasoning.

    Attributes:
        start: The beginning of an answer. It ends with the rule `calls`, which follows the mark that begins calls.
        rules: The rules that `start` names, except `calls`.
        rest: The text between that mark and the first call.
    """

    def __init__(
        self,
        form: ToolFormat,
        literal: Literal,
        names: tuple[str, ...],
        think: tuple[str, str] | None,
        budget: int | None = None,
    ):
        opening = (form.section_begin + form.call_begin).lstrip()
        mark = next(iter(opening.split()), "")
        self.rest = opening[len(mark) :]
        self._literal, self._think = literal, think
        self.rules = self._bare(form, names) if not mark else self._marked(mark)
        self.start = "body" if think is None else "thinking? body"
        if think is not None:
            self.rules += thinking_rules(think, literal, budget)

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
            f"MARKED: {ANY} {quoted(mark)} {ANY}",  # spelled by its letters, which would read like the token
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


def text_after_thought(think: tuple[str, str], in_thought: bool, literal: Literal, budget: int | None) -> str:
    """A Lark grammar of any text after at most `budget` tokens of reasoning.

    Args:
        think: Marks around reasoning.
        in_thought: The first mark has come already.
    """
    if in_thought:
        return "\n".join(["start: thought TEXT", f"TEXT: {ANY}", *thought_rules("thought", literal(think[1]), budget)])
    rules = thinking_rules(think, literal, budget)
    return "\n".join(["start: thinking? TEXT", f"TEXT: {ANY} & ~THOUGHTFUL", *rules])


def thinking_rules(think: tuple[str, str], literal: Literal, budget: int | None) -> list[str]:
    """The rule `thinking`: reasoning between its marks. THOUGHTFUL is any text that begins with reasoning."""
    begin, end = think
    shown = literal(begin)
    first = "THINKS" if shown == quoted(begin) else shown
    return [
        f"thinking: {first} thoughts",
        f"THINKS: /\\s*/ {quoted(begin)}",
        f"THOUGHTFUL: /\\s*/ {quoted(begin)} {ANY}",
        *thought_rules("thoughts", literal(end), budget),
    ]


def thought_rules(name: str, mark: str, budget: int | None = None) -> list[str]:
    """Lark rules of a text that ends with `mark`, which is Lark itself: a string or a control token.

    After `budget` tokens the mark is forced.
    """
    is_text = mark.startswith('"')
    if budget == 0:
        return [f"{name}: {mark}"]
    if budget is None:
        return [f"{name}[suffix={mark}]: {ANY}"] if is_text else [f"{name}: {ANY} {mark}"]
    if not is_text:
        return [f"{name}: {name}_cut {mark}", f"{name}_cut[max_tokens={budget}]: {ANY}"]
    # The first alternative is text that reaches the budget. It must be first, so that it is the one that is cut short.
    free, marked = f"{name}_free".upper(), f"{name}_marked".upper()
    return [
        f"{name}: {name}_cut {mark} | {name}_whole",
        f"{name}_cut[max_tokens={budget}]: {free}",
        f"{free}: {ANY} & ~{marked}",
        f"{marked}: {ANY} {mark} {ANY}",
        f"{name}_whole[suffix={mark}, max_tokens={budget}]: {ANY}",
    ]
