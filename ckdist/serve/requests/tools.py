"""The tools of a chat: `tools`, `tool_choice`, `parallel_tool_calls`, and `functions`, as they were called before."""

from dataclasses import dataclass
from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.requests.fields import Fields
from ckdist.tokens.chat_input import read_tool_list

CHOICES = ("none", "auto", "required", "any")


@dataclass(frozen=True)
class Tools:
    """`given`: the tools that may be called, as OpenAI writes them. `must_call`: the answer is a call.

    `strict`: names of tools whose arguments must hold to every keyword of their schemas.
    """

    given: tuple[dict[str, Any], ...] = ()
    must_call: bool = False
    parallel: bool = True
    strict: frozenset[str] = frozenset()

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Of each tool's parameters, by its name: a JSON Schema of an object."""
        functions = [tool["function"] for tool in self.given]
        return {item["name"]: {"type": "object", **(item.get("parameters") or {})} for item in functions}

    @property
    def types(self) -> dict[str, dict[str, str]]:
        """Of each tool, JSON's type of each parameter that has a single one."""
        return {
            name: {
                key: value["type"]
                for key, value in schema.get("properties", {}).items()
                if isinstance(value, dict) and isinstance(value.get("type"), str)
            }
            for name, schema in self.schemas.items()
        }


def read_tools(fields: Fields) -> Tools:
    """RequestError for tools that are none, and for a choice of one that is not there."""
    given, former = (read_tool_list(fields.value(name, list) or [], name) for name in ("tools", "functions"))
    parallel = fields.switch("parallel_tool_calls", True)
    name, choice = _choice(fields)
    given = given or former
    if choice == "none":
        return Tools()
    if not given:
        if choice in (None, "auto"):
            return Tools()
        raise RequestError(f"{name} asks for a call, and there are no tools; give tools", name, "invalid_value")
    if choice not in (None, *CHOICES):
        chosen = tuple(tool for tool in given if tool["function"]["name"] == choice)
        if not chosen:
            raise RequestError(f"{name} names {choice[:64]!r}, which is not among the tools", name, "invalid_value")
        return Tools(chosen, True, False, _strict(chosen))
    return Tools(given, choice in ("required", "any"), parallel, _strict(given))


def _strict(tools: tuple[dict[str, Any], ...]) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True)


def _choice(fields: Fields) -> tuple[str, str | None]:
    """The field, and a word of CHOICES or the name of a tool."""
    found: tuple[str, str | None] = ("tool_choice", None)
    for field in ("function_call", "tool_choice"):
        given = fields.value(field, str, dict)
        if given is None:
            continue
        if isinstance(given, dict):
            function = given.get("function", given)
            name = function.get("name") if isinstance(function, dict) else None
            if name is None and given.get("type") in CHOICES:
                name = given["type"]
            if not isinstance(name, str):
                raise RequestError(f"{field} must name a function", field, "invalid_value")
            found = field, name
        elif given not in CHOICES:
            raise RequestError(f"{field} ({given[:32]!r}) must be one of {', '.join(CHOICES)}", field, "invalid_value")
        else:
            found = field, given
    return found
