"""Finds how a model writes calls of tools, by rendering chats with and without calls and comparing them.

A call is `call_begin` NAME `middle` ARGUMENTS `call_end`. All calls of an answer stand between `section_begin` and
`section_end`, with `separator` between them. The forms are those that llama.cpp's parser of templates knows.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Message = dict[str, Any]
Render = Callable[[list[Message], list[Any] | None, bool], str | None]

NAMES = ("alphaprobe", "betaprobe")
IDS = ("call00001", "call00002")
KEYS = ("firstkeyprobe", "secondkeyprobe")
TEXTS = ("firsttextprobe", "secondtextprobe")
ANSWER = "answerprobe"
NAME_KEYS = ("name", "function", "tool_name")  # keys of a tool's name in different models
PYTHON_TAG = "<|python_tag|>"  # Llama 3's, before a call
THOUGHT = re.compile(r"^\s*<think>\s*</think>\s*|^\s*</think>\s*")
ARGUMENTS = dict(zip(KEYS, TEXTS, strict=True))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in KEYS}},
        },
    }
    for name in NAMES
]


@dataclass(frozen=True)
class ToolFormat:
    """The marks around calls, and the form of their arguments.

    Attributes:
        kind: The form of the arguments.
            object: The call is one JSON object with the name under `name_key` and the arguments under `arguments_key`.
                `call_begin` and `call_end` are around it, and `middle` is empty.
            json: The arguments are a JSON object.
            tagged: Each argument is `key_begin` KEY `key_end` VALUE `value_end`. Texts are written as they are, other
                values as JSON.
            Any other kind has a parser of its own.
        in_prompt: The template itself describes the tools to the model.
        id_end: If not empty, a call's id is between `middle` and this.
    """

    kind: str
    call_begin: str = ""
    middle: str = ""
    call_end: str = ""
    section_begin: str = ""
    section_end: str = ""
    separator: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    key_begin: str = ""
    key_end: str = ""
    value_end: str = ""
    id_end: str = ""
    in_prompt: bool = True

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts around names and arguments."""
        found = (self.call_begin, self.middle, self.call_end, self.section_begin, self.section_end, self.separator)
        return (*found, self.key_begin, self.key_end, self.value_end, self.id_end)


# The format that the prompt requests from a model whose template knows no tools.
HERMES = ToolFormat("object", "<tool_call>\n", "", "\n</tool_call>", separator="\n", in_prompt=False)


def find_tool_format(render: Render) -> ToolFormat:
    """Finds the format from rendered chats.

    Args:
        render: (messages, tools, add_generation_prompt) -> prompt, or None if the template refuses.
    """
    question = {"role": "user", "content": "q"}
    start = render([question], TOOLS, True)
    if start is None or NAMES[0] not in start:
        return HERMES
    for content in ("", None):
        for as_text in (False, True):
            one, two = (render([question, _calls(count, content, as_text)], TOOLS, False) for count in (1, 2))
            plain = render([question, {"role": "assistant", "content": ANSWER}], TOOLS, False)
            if one is None or plain is None or TEXTS[0] not in one or '\\"' + KEYS[0] in one:
                continue
            found = _compare(start, plain, one, two)
            if found is not None:
                return found
    return replace(HERMES, in_prompt=True)


def _calls(count: int, content: str | None, as_text: bool) -> Message:
    """A message of the assistant with `count` calls."""
    arguments = json.dumps(ARGUMENTS) if as_text else ARGUMENTS
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name in list(zip(IDS, NAMES, strict=True))[:count]
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _compare(start: str, plain: str, one: str, two: str | None) -> ToolFormat | None:
    """The format, from the prompts before an answer, with a text answer, with one call and with two."""
    begin = _common(start, one)
    end = plain[plain.rindex(ANSWER) + len(ANSWER) :] if ANSWER in plain else ""
    tail = len(one) - (len(end) if end and one.endswith(end) else 0)
    while begin and one[begin - 1] not in "\n>]":  # not in the middle of a word of the generation prompt
        begin -= 1
    name = one.find(NAMES[0], begin)
    if name < 0:
        return None
    parsed = _arguments(one, name + len(NAMES[0]))
    if parsed is None:
        return None
    found, arguments, after = parsed
    before, middle, behind = one[begin:name], one[name + len(NAMES[0]) : arguments], one[after:tail]
    between = _between(two, found)
    middle, _, id_end = middle.partition(IDS[0])
    found = _split(replace(found, middle=middle, id_end=id_end), before, between, _without_end(behind, end))
    return _as_object(found) if found.kind == "json" else found


def _common(a: str, b: str) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def _shared_end(a: str, b: str) -> str:
    """The common suffix. If it begins inside a tag, the rest of that tag is left out."""
    n = next((n for n in range(min(len(a), len(b)), 0, -1) if a.endswith(b[-n:])), 0)
    begin = len(a) - n
    for opening, closing in ("<>", "[]"):
        if a.rfind(opening, 0, begin) > a.rfind(closing, 0, begin):
            end = a.find(closing, begin)
            begin = end + 1 if end >= 0 else len(a)
    return a[begin:]


def _arguments(text: str, begin: int) -> tuple[ToolFormat, int, int] | None:
    """The kind of the arguments after a name, and their begin and end."""
    key, value = text.find(KEYS[0], begin), text.find(TEXTS[1], begin)
    if key < 0 or value < 0:
        return None
    brace = text.rfind("{", begin, key)
    if brace >= 0 and text[key - 1] == '"':
        try:
            given, end = json.JSONDecoder().raw_decode(text, brace)
        except ValueError:
            return None
        return (ToolFormat("json"), brace, end) if given == ARGUMENTS else None
    # KEY key_end VALUE value_end key_begin KEY key_end VALUE value_end
    first, second = text.find(TEXTS[0], key), text.find(KEYS[1], key)
    if not key < first < second < value:
        return None
    key_end = text[key + len(KEYS[0]) : first]
    gap = text[first + len(TEXTS[0]) : second]  # value_end and key_begin
    head = text[begin:key]
    key_begin = _shared_end(gap, head).lstrip()
    if not key_begin or not key_end:
        return None
    value_end = gap[: len(gap) - len(key_begin)]
    after = value + len(TEXTS[1])
    if not text.startswith(value_end.rstrip(), after):
        return None
    after += len(value_end) if text.startswith(value_end, after) else len(value_end.rstrip())
    return ToolFormat("tagged", key_begin=key_begin, key_end=key_end, value_end=value_end), key - len(key_begin), after


def _between(two: str | None, found: ToolFormat) -> str | None:
    """The text between the arguments of one call and the name of the next. None if the prompts do not show it."""
    if two is None or NAMES[1] not in two:
        return None
    first = two.find(TEXTS[1])
    second = two.find(NAMES[1], first)
    if first < 0 or second < 0:
        return None
    text = two[first + len(TEXTS[1]) : second]
    # JSON arguments end with a quotation mark and a brace.
    end = text.find("}") + 1 if found.kind == "json" else len(found.value_end.rstrip())
    if found.kind == "tagged" and text.startswith(found.value_end):
        end = len(found.value_end)
    return text[end:] if end <= len(text) else None


def _without_end(behind: str, end: str) -> str:
    """The text after the last call, without the end of the turn."""
    cut = behind.find(end.strip()) if end.strip() else -1
    behind = behind[:cut] if cut >= 0 else behind
    return re.sub(
        r"(<\|(eot_id|eom_id|im_end|end|return|call)\|>|</s>|<\uff5cend\u2581of\u2581sentence\uff5c>|<eos>)\s*$",
        "",
        behind,
    )


def _split(found: ToolFormat, before: str, between: str | None, behind: str) -> ToolFormat:
    """Divides the text around calls into marks of calls and marks of the section."""
    if between is None:
        return replace(found, call_begin=THOUGHT.sub("", before), call_end=behind)
    call_begin = _shared_end(between, before)
    rest = between[: len(between) - len(call_begin)]
    section_begin = THOUGHT.sub("", before[: len(before) - len(call_begin)])
    end = _common(rest, behind)
    return replace(
        found,
        call_begin=call_begin,
        section_begin=section_begin,
        call_end=behind[:end],
        section_end=behind[end:],
        separator=rest[end:],
    )


def _as_object(found: ToolFormat) -> ToolFormat:
    """Changes the kind to `object` if the name is in the same JSON object as the arguments."""
    head = re.search(r"\{\s*(?:\"type\":\s*\"function\",\s*\"function\":\s*\{\s*)?\"(\w+)\":\s*\"$", found.call_begin)
    key = re.match(r"\",\s*\"(\w+)\":\s*$", found.middle)
    if head is None or key is None:
        return found
    closing = re.match(r"\s*(,\s*\"\w+\":\s*\"[^\"]*\"\s*)*\}+", found.call_end)
    return replace(
        found,
        kind="object",
        call_begin=found.call_begin[: head.start()],
        call_end=found.call_end[closing.end() :] if closing else found.call_end,
        middle="",
        name_key=head[1],
        arguments_key=key[1],
    )
