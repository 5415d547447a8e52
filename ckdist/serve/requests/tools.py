"""The tools of a chat: `tools`, `tool_choice`, `parallel_tool_calls`, and `functions`, as they were called before."""

import re
from dataclasses import dataclass
from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.requests.fields import Fields
from ckdist.serve.requests.json_body import kind_of

MAX_TOOLS = 256
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
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
    given, former = _tools(fields, "tools"), _tools(fields, "functions")
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


def _tools(fields: Fields, name: str) -> tuple[dict[str, Any], ...]:
    given = fields.value(name, list) or []
    if len(given) > MAX_TOOLS:
        raise RequestError(f"{name} has {len(given)} tools; at most {MAX_TOOLS} are taken", name, "invalid_value")
    tools = tuple(_tool(tool, f"{name}[{index}]", name) for index, tool in enumerate(given))
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError(f"{name} has two tools of one name; give each its own", name, "invalid_value")
    return tools


def _tool(tool: Any, where: str, field: str) -> dict[str, Any]:
    function = tool.get("function") if field == "tools" and isinstance(tool, dict) else tool
    if field == "tools" and isinstance(tool, dict) and tool.get("type", "function") != "function":
        kind = str(tool["type"])[:32]
        raise RequestError(f"{where} has type {kind!r}; only 'function' is known", field, "invalid_value")
    if not isinstance(function, dict):
        message = f"{where} must be an object with a function, not {kind_of(tool)}"
        raise RequestError(message, field, "invalid_type")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        message = f"{where} needs a name of 1 to 128 letters, digits, or any of _ . : -"
        raise RequestError(message, field, "invalid_value")
    if parameters is not None and not isinstance(parameters, dict):
        message = f"{where}: parameters must be a JSON Schema, not {kind_of(parameters)}"
        raise RequestError(message, field, "invalid_json_schema")
    properties, needed = (parameters or {}).get("properties", {}), (parameters or {}).get("required", [])
    is_object = (parameters or {}).get("type", "object") == "object"
    if not is_object or not isinstance(properties, dict) or not isinstance(needed, list):
        raise RequestError(f"{where}: parameters must be the schema of an object", field, "invalid_json_schema")
    return {"type": "function", "function": function}


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
