"""Parses the tool calls in an answer into deltas, in the formats that `ckdist.tokens.tool_format` detects."""

import json
from collections.abc import Callable, Mapping

from ckdist.serve.parsers.delta import Delta
from ckdist.serve.parsers.reader import NotAsExpected, Parsing, TextReader
from ckdist.tokens.tool_format import NAME_KEYS, ToolFormat

ARGUMENTS_KEYS = ("arguments", "parameters", "args", "input")
MAX_NAME = 256
MAX_ID = 64
OBJECTS = ("object", "llama3")  # kinds whose call is one JSON object

Types = Mapping[str, Mapping[str, str]]  # tool name -> parameter name -> JSON type


class CallReader:
    """Reads calls from `reader` and passes their deltas to `give`. `count` is the number of calls that have begun."""

    def __init__(self, form: ToolFormat, types: Types, reader: TextReader, give: Callable[[Delta], None]):
        self.format, self.types, self.reader, self._give = form, types, reader, give
        self.count = 0

    @property
    def trigger(self) -> str:
        """The first word of the mark before an answer's calls; empty if there is no mark."""
        return next(iter((self.format.section_begin.strip() or self.format.call_begin).split()), "")

    @property
    def may_be_bare(self) -> bool:
        """True if a JSON object without any mark may be a call."""
        return not self.trigger

    def calls(self) -> Parsing[None]:
        """Reads all calls after the trigger. Raises NotAsExpected if something else follows."""
        section, begin = self.format.section_begin.strip(), self.format.call_begin.strip()
        yield from self._rest_of(section or begin)
        first = bool(section)
        while True:
            if first and begin:
                yield from self._mark(begin)
            yield from self.call()
            yield from self.reader.space()
            if self.format.separator.strip() and (yield from self._tried(self.format.separator.strip())):
                first = True
                continue
            if self.format.section_end.strip() and (yield from self._tried(self.format.section_end.strip())):
                return
            if not begin and self.may_be_bare and (yield from self.reader.peek()) == "{":
                continue
            if not begin or not (yield from self._tried(begin)):
                return
            first = False

    def call(self) -> Parsing[None]:
        """Reads one call after its begin mark."""
        if self.format.kind in OBJECTS:
            yield from self._object()
        elif self.format.kind == "tagged":
            yield from self._tagged()
        else:
            yield from self._named()
        yield from self.reader.space()
        for line in self.format.call_end.split("\n"):
            if line.strip() and not (yield from self._tried(line.strip())):
                return

    def begin(self, name: str, id: str | None = None) -> int:
        """Begins the next call and returns its number.

        Raises NotAsExpected for an unknown tool if only the name distinguishes calls from other JSON.
        """
        if self.may_be_bare and name not in self.types:
            raise NotAsExpected("a tool's name")
        self._give(Delta(call=self.count, name=name, id=id))
        self.count += 1
        return self.count - 1

    def arguments(self, call: int, text: str) -> None:
        """Passes on a part of a call's arguments."""
        self._give(Delta(call=call, arguments=text))

    def _object(self) -> Parsing[None]:
        """Reads a JSON object with a name and arguments, in any order. Other keys are ignored."""
        reader, call, early = self.reader, None, list[str]()
        yield from reader.space()
        yield from reader.expect("{")
        given = False
        while True:
            yield from reader.space()
            if (yield from reader.starts("}")):
                break
            key = json.loads((yield from self._whole()))
            yield from reader.space()
            yield from reader.expect(":")
            yield from reader.space()
            if call is None and key in (self.format.name_key, *NAME_KEYS):
                if (yield from reader.peek()) == "{":  # {"type": "function", "function": {"name": …}}
                    yield from self._object()
                    yield from reader.space()
                    yield from reader.expect("}")
                    return
                call = self.begin(_text(json.loads((yield from self._whole()))))
                for text in early:
                    self.arguments(call, text)
            elif key in (self.format.arguments_key, *ARGUMENTS_KEYS) and not given:
                given = True
                yield from self._object_arguments(call, early)
            else:
                yield from reader.value(lambda _: None)
            yield from reader.space()
            yield from reader.starts(",")
        if call is None:
            raise NotAsExpected("a name")
        if not given:
            self.arguments(call, "{}")

    def _object_arguments(self, call: int | None, early: list[str]) -> Parsing[None]:
        """Reads the arguments: an object, passed on as it arrives, or a string that contains JSON."""
        give = early.append if call is None else lambda text: self.arguments(call, text)
        if (yield from self.reader.peek()) == "{":
            yield from self.reader.value(give)
            return
        value = json.loads((yield from self._whole()))
        give(value if isinstance(value, str) and value.lstrip().startswith("{") else json.dumps(value or {}))

    def _named(self) -> Parsing[None]:
        """Reads a name, a mark, in some formats an id and another mark, and arguments as a JSON object."""
        written, id_end = (yield from self._name(self.format.middle)), self.format.id_end.strip()
        id = (yield from self._text_until(id_end)).strip()[:MAX_ID] if id_end else self.id(written)
        call = self.begin(self.name(written), id)
        yield from self.reader.space()
        if (yield from self.reader.peek()) == "{":
            yield from self.reader.value(lambda text: self.arguments(call, text))
        else:
            self.arguments(call, "{}")

    def name(self, text: str) -> str:
        """Returns the name of a tool from the text that the model wrote for it."""
        return text.strip()

    def id(self, text: str) -> str | None:  # noqa: ARG002, subclasses need it
        """Returns the id of a call if the model wrote it as a part of the tool's name."""
        return None

    def _tagged(self) -> Parsing[None]:
        """Reads a name, and arguments with a tag each. A value is text or JSON, by the parameter's type."""
        reader, form = self.reader, self.format
        name = yield from self._name(form.middle)
        call, before = self.begin(name), "{"
        while True:
            yield from reader.space()
            if not (yield from self._tried(form.key_begin.strip())):
                break
            key = (yield from self._text_until(form.key_end.strip())).strip()
            value = yield from self._text_until(form.value_end.strip())
            shown = json.dumps(_typed(value, self.types.get(name, {}).get(key)), ensure_ascii=False)
            self.arguments(call, f"{before}{json.dumps(key, ensure_ascii=False)}: {shown}")
            before = ", "
        self.arguments(call, "{}" if before == "{" else "}")

    def _name(self, end: str) -> Parsing[str]:
        reader, parts = self.reader, list[str]()
        after = [mark.strip() for mark in (self.format.key_begin, self.format.call_end.strip().split("\n")[0])]
        marks = (end.strip() or end or "\n", *(mark for mark in after if mark))
        found = yield from reader.until(marks, parts.append)
        if found is None:
            raise NotAsExpected("a name")
        if found != marks[0]:
            reader.at -= len(found)  # the next part reads it again
        name = "".join(parts).strip()
        if not 0 < len(name) <= MAX_NAME:
            raise NotAsExpected("a name")
        return name

    def _text_until(self, end: str) -> Parsing[str]:
        parts = list[str]()
        if (yield from self.reader.until((end,), parts.append)) is None:
            raise NotAsExpected(end)
        return "".join(parts)

    def _whole(self) -> Parsing[str]:
        parts = list[str]()
        yield from self.reader.value(parts.append)
        return "".join(parts)

    def _rest_of(self, mark: str) -> Parsing[None]:
        """Reads the words of `mark` after the first, which is the trigger."""
        for word in mark.split()[1:]:
            yield from self._mark(word)

    def _mark(self, mark: str) -> Parsing[None]:
        if not (yield from self._tried(mark)):
            raise NotAsExpected(mark)

    def _tried(self, mark: str) -> Parsing[bool]:
        """Reads `mark` if it comes next, and returns whether it does. Its words may have any white space between."""
        if not mark:
            return True
        first, *others = mark.split()
        yield from self.reader.space()
        if not (yield from self.reader.starts(first)):
            return False
        for word in others:
            yield from self.reader.space()
            yield from self.reader.expect(word)
        return True


class KimiCallReader(CallReader):
    """Reads Kimi K2's calls, in which names are written as functions.NAME:NUMBER.

    All of that is the call's id, which the template writes in place of the name in the next turn.
    """

    def __init__(self, form: ToolFormat, types: Types, reader: TextReader, give: Callable[[Delta], None]):
        super().__init__(form, types, reader, give)
        self._ids: set[str] = set()

    def name(self, text: str) -> str:
        """Returns the name between its prefix and its number."""
        return text.removeprefix("functions.").partition(":")[0]

    def id(self, text: str) -> str | None:
        """Returns the whole text, or None if it has no number, is too long, or is another call's id."""
        if ":" not in text or len(text) > MAX_ID or text in self._ids:
            return None
        self._ids.add(text)
        return text


def _text(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
        raise NotAsExpected("a name")
    return value


def _typed(value: str, kind: str | None) -> object:
    """The text itself for a string parameter; else its value as JSON, or the text if it is not JSON."""
    value = value.removeprefix("\n").removesuffix("\n")
    if kind == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return {"true": True, "false": False, "none": None}.get(value.strip().lower(), value)
