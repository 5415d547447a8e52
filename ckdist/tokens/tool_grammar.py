"""The grammar of an answer that calls tools, in the model's own form of calls."""

import json
from collections.abc import Mapping
from typing import Any

from ckdist.tokens.grammar import SEPARATORS, quoted
from ckdist.tokens.schema_patterns import with_exact_patterns
from ckdist.tokens.text_before_calls import Literal, TextBeforeCalls, thought_rules
from ckdist.tokens.tool_format import ToolFormat

ANSWER = "answer"  # name of the grammar that an answer without calls follows
MAX_CALLS = 16  # of one answer
ID = "/[a-zA-Z0-9]{9}/"  # of a call, in the form of Mistral's templates
NUMBER = "/(0|[1-9][0-9]{0,3})/"  # of a call, after the tool's name, as Kimi writes it
SPACE = "/\\s{0,3}/"  # before a call without a mark, in the same terminal, so that it cannot be read as text

Schemas = Mapping[str, dict[str, Any]]  # tool -> schema of its parameters


class ToolGrammar:
    """Writes the Lark rules for the tools of one request.

    Args:
        strict: Tools whose schemas may hold no unknown keyword.
        budget: Most tokens of reasoning.
    """

    def __init__(
        self, form: ToolFormat, literal: Literal, strict: frozenset[str] = frozenset(), budget: int | None = None
    ) -> None:
        self.form, self._literal, self._strict, self._budget = form, literal, strict, budget

    def lark(self, schemas: Schemas, parallel: bool, thought_end: str | None, or_answer: bool = False) -> str:
        """A grammar of one call, or of several if `parallel`.

        Args:
            thought_end: If set, reasoning up to this mark comes first.
            or_answer: The grammar named ANSWER may be followed instead.
        """
        first = self.form.section_begin + self.form.call_begin
        if thought_end is not None:  # the space after reasoning is the space before the first mark
            first = first.lstrip(" \n")
        rules = self._rules_of_calls(schemas, parallel, first)
        return with_thought(
            f"(calls | @{ANSWER})" if or_answer else "calls", rules, thought_end, self._literal, self._budget
        )

    def lark_in_text(self, schemas: Schemas, parallel: bool, think: tuple[str, str] | None, in_thought: bool) -> str:
        """A grammar of any text. The beginning of a call must be followed by calls, and nothing follows these.

        Args:
            think: Marks around reasoning, in which no call begins.
            in_thought: The first of these marks has come already.
        """
        text = TextBeforeCalls(self.form, self._literal, tuple(schemas), None if in_thought else think, self._budget)
        rules = [*text.rules, *self._rules_of_calls(schemas, parallel, text.rest)]
        if think is None or not in_thought:
            return "\n".join([f"start: {text.start}", *rules])
        thought = thought_rules("thought", self._literal(think[1]), self._budget)
        return "\n".join([f"start: thought {text.start}", *thought, *rules])

    def _rules_of_calls(self, schemas: Schemas, parallel: bool, first: str) -> list[str]:
        """The rule `calls`, which begins with `first`, and the rules that it names."""
        form, rules = self.form, list[str]()
        marked = bool((form.separator + form.call_begin + form.section_begin).strip())
        tools = enumerate(schemas.items())
        names = [self._call(rules, index, name, schema, marked) for index, (name, schema) in tools]
        rules.append("call: " + " | ".join(names))
        again = self._parts(form.separator + form.call_begin)
        more = f" ({again} call){{0,{MAX_CALLS - 1}}}" if parallel and marked else ""
        rules.append(f"calls: {self._parts(first)} call{more} {self._parts(form.section_end)}")
        return rules

    def _call(self, rules: list[str], index: int, name: str, schema: dict[str, Any], marked: bool) -> str:
        """Adds the rule for a call of one tool and returns its name. If calls are `marked`, the rule begins after the
        mark.
        """
        form, rule = self.form, f"call_{index}"
        if form.kind == "tagged":
            arguments = " ".join(
                self._argument(rules, f"{rule}_{number}", key, value, key in schema.get("required", ()))
                for number, (key, value) in enumerate(schema.get("properties", {}).items())
            )
            body = f"{self._parts(name + form.middle)} {arguments} {self._parts(form.call_end)}"
        elif form.kind in ("object", "llama3"):
            before = f"{{{json.dumps(form.name_key)}: {json.dumps(name)}, {json.dumps(form.arguments_key)}: "
            rules.append(f"BEGIN_{index}: {'' if marked else SPACE} {quoted(before)}")
            body = f"BEGIN_{index} {self._json(schema, name)} {self._parts('}' + form.call_end)}"
        else:
            id = f" {ID} {self._literal(form.id_end)}" if form.id_end else ""
            shown = self._parts(name + form.middle)
            if form.kind == "kimi":
                shown = f"{self._parts(f'functions.{name}:')} {NUMBER} {self._parts(form.middle)}"
            body = f"{shown}{id} {self._json(schema, name)} {self._parts(form.call_end)}"
        rules.append(f"{rule}: {body}")
        return rule

    def _argument(self, rules: list[str], rule: str, key: str, schema: Any, required: bool) -> str:
        """Adds the rule for one tagged argument and returns its name, optional unless `required`."""
        form, schema = self.form, schema if isinstance(schema, dict) else {}
        begin, end = self._parts(form.key_begin + key + form.key_end), self._parts(form.value_end)
        choices = schema.get("enum")
        if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            body = "(" + " | ".join(quoted(choice) for choice in choices) + f") {end}"
        elif schema.get("type", "string") == "string":
            rules.append(f"{rule}_text[suffix={quoted(form.value_end)}]: /(?s:.*)/")
            body = f"{rule}_text"
        else:
            body = f"{self._json(schema, '')} {end}"
        rules.append(f"{rule}: {begin} {body}")
        return rule if required else f"{rule}?"

    def _json(self, schema: dict[str, Any], name: str) -> str:
        return json_rule(schema, name in self._strict)

    def _parts(self, text: str) -> str:
        return self._literal(text) if text else '""'


def json_rule(schema: dict[str, Any], strict: bool) -> str:
    """JSON by a schema, as Lark. If `strict`, an unknown keyword in the schema is an error."""
    options = {**SEPARATORS, "lenient": not strict}
    return "%json " + json.dumps({**with_exact_patterns(schema), "x-guidance": options}, ensure_ascii=False)


def with_thought(
    start: str, rules: list[str], thought_end: str | None, literal: Literal, budget: int | None = None
) -> str:
    """Lark rules that begin with `start`.

    If there is a `thought_end`, reasoning comes first, up to this mark or for `budget` tokens.
    """
    if thought_end is None:
        return "\n".join([f"start: {start}", *rules])
    thought = thought_rules("thought", literal(thought_end), budget)
    return "\n".join([f"start: thought /[ \\n]{{0,3}}/ ({start})", *thought, *rules])


def with_answer(lark: str, grammar: str) -> str:
    """Returns `lark` with `grammar` in place of ANSWER."""
    given = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**given, "name": ANSWER}]})
