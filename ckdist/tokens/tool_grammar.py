"""The grammar of an answer that calls tools, in the form in which the model writes calls."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from ckdist.tokens.grammar import SEPARATORS, quoted
from ckdist.tokens.tool_format import ToolFormat

ANSWER = "answer"  # the name of another grammar, that an answer without calls follows
MAX_CALLS = 16  # of one answer

Schemas = Mapping[str, dict[str, Any]]  # of the parameters of each tool
Literal = Callable[[str], str]  # a text as Lark, with its control tokens as such


class ToolGrammar:
    """Writes the rules of Lark for one request's tools."""

    def __init__(self, form: ToolFormat, literal: Literal, strict: frozenset[str] = frozenset()) -> None:
        """`strict`: the tools whose schemas may hold no keyword that is not known."""
        self.form, self._literal, self._strict = form, literal, strict
        self._rules: list[str] = []

    def lark(self, schemas: Schemas, parallel: bool, thought_end: str | None, or_answer: bool = False) -> str:
        """One call, or more where `parallel`. `thought_end`: reasoning up to this mark comes first. `or_answer`: the
        grammar named ANSWER may be followed instead.
        """
        names = [self._call(index, name, schema) for index, (name, schema) in enumerate(schemas.items())]
        self._rules.append("call: " + " | ".join(names))
        marked = (self.form.separator + self.form.call_begin + self.form.section_begin).strip()
        more = f" ({self._parts(self.form.separator)} call){{0,{MAX_CALLS - 1}}}" if parallel and marked else ""
        section = f"{self._parts(self.form.section_begin)} call{more} {self._parts(self.form.section_end)}"
        self._rules.append(f"calls: {section}")
        start = f"(calls | @{ANSWER})" if or_answer else "calls"
        return with_thought(start, self._rules, thought_end, self._literal)

    def _call(self, index: int, name: str, schema: dict[str, Any]) -> str:
        """The name of the rule for a call of one tool."""
        form, rule = self.form, f"call_{index}"
        if form.kind == "tagged":
            arguments = " ".join(
                self._argument(f"{rule}_{number}", key, value, key in schema.get("required", ()))
                for number, (key, value) in enumerate(schema.get("properties", {}).items())
            )
            body = f"{self._parts(form.call_begin + name + form.middle)} {arguments} {self._parts(form.call_end)}"
        elif form.kind in ("object", "llama3"):
            before = f"{{{json.dumps(form.name_key)}: {json.dumps(name)}, {json.dumps(form.arguments_key)}: "
            begin, end = self._parts(form.call_begin + before), self._parts("}" + form.call_end)
            body = f"{begin} {self._json(schema, name)} {end}"
        else:
            shown = f"functions.{name}:0" if form.kind == "kimi" else name
            begin = self._parts(form.call_begin + shown + form.middle)
            body = f"{begin} {self._json(schema, name)} {self._parts(form.call_end)}"
        self._rules.append(f"{rule}: {body}")
        return rule

    def _argument(self, rule: str, key: str, schema: Any, required: bool) -> str:
        """One tagged argument, which may be left out where it is not required."""
        form, schema = self.form, schema if isinstance(schema, dict) else {}
        begin, end = self._parts(form.key_begin + key + form.key_end), self._parts(form.value_end)
        choices = schema.get("enum")
        if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            body = "(" + " | ".join(quoted(choice) for choice in choices) + f") {end}"
        elif schema.get("type", "string") == "string":
            self._rules.append(f"{rule}_text[suffix={quoted(form.value_end)}]: /(?s:.*)/")
            body = f"{rule}_text"
        else:
            body = f"{self._json(schema, '')} {end}"
        self._rules.append(f"{rule}: {begin} {body}")
        return rule if required else f"{rule}?"

    def _json(self, schema: dict[str, Any], name: str) -> str:
        return json_rule(schema, name in self._strict)

    def _parts(self, text: str) -> str:
        return self._literal(text) if text else '""'


def json_rule(schema: dict[str, Any], strict: bool) -> str:
    """JSON by a schema, as Lark; `strict`: it may hold no keyword that is not known."""
    options = {**SEPARATORS, "lenient": not strict}
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def with_thought(start: str, rules: list[str], thought_end: str | None, literal: Literal) -> str:
    """Rules of Lark that begin with `start`, after reasoning up to its mark where there is one."""
    if thought_end is None:
        return "\n".join([f"start: {start}", *rules])
    mark = literal(thought_end)
    text = f"thought[suffix={mark}]: /(?s:.*)/"
    thought = text if mark.startswith('"') else f"thought: /(?s:.*)/ {mark}"
    return "\n".join([f"start: thought /[ \\n]{{0,3}}/ {start}", thought, *rules])


def with_answer(lark: str, grammar: str) -> str:
    """`lark`, in which ANSWER stands for `grammar`."""
    given = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**given, "name": ANSWER}]})
