"""Reads the tools of a chat: `tools`, `tool_choice`, `parallel_tool_calls`, and the former name `functions`.

A custom tool takes free text. The model sees it as a function with one string.
"""

import json
from dataclasses import dataclass
from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.requests.request_fields import Fields, wrong
from ckdist.tokens.chat_input import TEXT, custom_tools, read_tool_list

CHOICES = ("none", "auto", "required", "any")


@dataclass(frozen=True)
class Tools:
    """The tools of a chat."""

    given: tuple[dict[str, Any], ...] = ()  # tools that may be called, in OpenAI's format
    must_call: bool = False  # the answer must be a call
    parallel: bool = True  # the answer may have several calls
    strict: frozenset[str] = frozenset()  # names of tools whose arguments must satisfy every keyword of their schemas
    custom: frozenset[str] = frozenset()  # names of tools that take free text

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Tool name -> JSON Schema of its parameters."""
        functions = [tool["function"] for tool in self.given]
        return {item["name"]: {"type": "object", **(item.get("parameters") or {})} for item in functions}

    @property
    def types(self) -> dict[str, dict[str, str]]:
        """Tool name -> parameter name -> JSON type, for parameters with a single type."""
        return {
            name: {
                key: value["type"]
                for key, value in schema.get("properties", {}).items()
                if isinstance(value, dict) and isinstance(value.get("type"), str)
            }
            for name, schema in self.schemas.items()
        }


@dataclass(frozen=True)
class Choice:
    """The value of `field` about calls: a word of CHOICES, or the names of the tools that may be called."""

    field: str = "tool_choice"
    word: str | None = None
    names: tuple[str, ...] | None = None


def read_tools(fields: Fields) -> Tools:
    """Reads the tools. Raises RequestError for malformed tools, and for the choice of a tool that is not there."""
    raw = fields.value("tools", list) or []
    given, former = read_tool_list(raw, "tools"), read_tool_list(fields.value("functions", list) or [], "functions")
    parallel = fields.switch("parallel_tool_calls", True)
    choice = _choice(fields)
    given = given or former
    if choice.word == "none":
        return Tools()
    if not given:
        if choice.word in (None, "auto") and not choice.names:
            return Tools()
        raise wrong(choice.field, "asks for a call, and there are no tools; give tools")
    names = choice.names or ()
    known = [tool["function"]["name"] for tool in given]
    absent = next((name for name in names if name not in known), None)
    if absent is not None:
        raise wrong(choice.field, f"names {absent[:64]!r}, which is not among the tools")
    if choice.names is not None:
        given = tuple(tool for tool in given if tool["function"]["name"] in names)
        parallel = parallel and choice.word is not None  # a tool that is named is called once
    custom = custom_tools(raw) & {tool["function"]["name"] for tool in given}
    strict = frozenset(tool["function"]["name"] for tool in given if tool["function"].get("strict") is True)
    must_call = choice.word in ("required", "any") or (choice.word is None and choice.names is not None)
    return Tools(given, must_call, parallel, strict, custom)


def history_call(call: dict[str, Any]) -> dict[str, Any]:
    """Converts a call of the history to a call of a function."""
    custom = call.get("custom")
    if call.get("type") != "custom" or not isinstance(custom, dict):
        return call
    function = {"name": custom.get("name"), "arguments": json.dumps({TEXT: custom.get(TEXT)}, ensure_ascii=False)}
    return {"id": call.get("id"), "type": "function", "function": function}


def _choice(fields: Fields) -> Choice:
    found = Choice()
    for field in ("function_call", "tool_choice"):
        given = fields.value(field, str, dict)
        if given is None:
            continue
        if isinstance(given, dict):
            found = _allowed(given, field) if given.get("type") == "allowed_tools" else _named(given, field)
        elif given not in CHOICES:
            raise wrong(field, f"({given[:32]!r}) must be one of {', '.join(CHOICES)}")
        else:
            found = Choice(field, given)
    return found


def _named(given: dict[str, Any], field: str) -> Choice:
    name = _name_of(given)
    if name is None and given.get("type") in CHOICES:
        return Choice(field, given["type"])
    if name is None:
        raise wrong(field, "must name a function or a custom tool")
    return Choice(field, names=(name,))


def _allowed(given: dict[str, Any], field: str) -> Choice:
    """Reads OpenAI's choice among some of the tools."""
    allowed = given.get("allowed_tools")
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    names = [_name_of(tool) for tool in tools] if isinstance(tools, list) else []
    mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
    if not names or None in names or mode not in ("auto", "required"):
        message = f"{field}.allowed_tools needs a mode (auto or required) and a list of tools, each with its name"
        raise RequestError(message, field, "invalid_value")
    return Choice(field, mode, tuple(name for name in names if name is not None))


def _name_of(tool: Any) -> str | None:
    """The name in a reference to a tool, {"type": "function", "function": {"name": …}}."""
    inner = tool.get("function", tool.get("custom", tool)) if isinstance(tool, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None
