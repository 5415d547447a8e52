"""Checks the messages and tools of a chat in OpenAI's form, and returns them in the form of `ChatTemplate.render`.

Serving reads the bodies of requests with it, and training its records, so templates get the same input from both.
"""

import re
from typing import Any

from ckdist.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_TOOLS = 256
TEXT = "input"  # the one parameter of a custom tool
TEXT_SCHEMA = {"type": "object", "properties": {TEXT: {"type": "string"}}, "required": [TEXT]}
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def kind_of(value: object) -> str:
    """JSON's word for the type of `value`."""
    if value is None:
        return "null"
    words = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return words.get(type(value), f"a {type(value).__name__}")  # rows of a table hold other types


def read_message(message: Any, name: str) -> dict[str, Any]:
    """Reads one message. `name` begins the text of each RequestError."""
    if not isinstance(message, dict):
        raise RequestError(f"{name} must be an object, not {kind_of(message)}", "messages")
    role = message.get("role")
    if role not in ROLES:
        shown = repr(role[:32]) if isinstance(role, str) else kind_of(role)
        raise RequestError(f"{name}.role ({shown}) must be one of {', '.join(ROLES)}", "messages")
    content = _content(message.get("content"), f"{name}.content")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise RequestError(f"{name}.tool_calls must be a list of objects", "messages")
    if content is None and not calls and role != "assistant":
        raise RequestError(f"{name}.content is needed for the role {role!r}", "messages")
    return {**message, "role": role, "content": content, **_reasoning(message, name)}


def read_tool_list(given: list[Any], field: str) -> tuple[dict[str, Any], ...]:
    """Reads the tools of a chat.

    Args:
        field: "tools", or "functions", whose entries have no type.
    """
    if len(given) > MAX_TOOLS:
        raise RequestError(f"{field} has {len(given)} tools; at most {MAX_TOOLS} are allowed", field, "invalid_value")
    tools = tuple(_tool(tool, f"{field}[{index}]", field) for index, tool in enumerate(given))
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError(f"{field} has two tools of one name; give each its own", field, "invalid_value")
    return tools


def custom_tools(given: list[Any]) -> frozenset[str]:
    """Names of the tools that take free text. `given` must have passed `read_tool_list`."""
    return frozenset(tool["custom"]["name"] for tool in given if tool.get("type") == "custom")


def _reasoning(message: dict[str, Any], name: str) -> dict[str, str]:
    """The assistant's reasoning, under every name that templates read."""
    for field in ("reasoning_content", "reasoning", "thinking"):
        given = message.get(field)
        if given is not None and not isinstance(given, str):
            raise RequestError(f"{name}.{field} must be a string, not {kind_of(given)}", "messages")
    found = message.get("reasoning_content") or message.get("reasoning") or message.get("thinking")
    return dict.fromkeys(("reasoning_content", "reasoning", "thinking"), found) if found else {}


def _content(content: Any, name: str) -> str | list[dict[str, str]] | None:
    """Plain text, or a list of text parts, which the template may join."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{name} must be a string or a list of parts, not {kind_of(content)}", "messages")
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise RequestError(f"{name}[{index}] must be an object with a type", "messages")
        if part["type"] != "text":
            raise RequestError(f"{name}[{index}] has type {part['type'][:32]!r}; only 'text' is supported", "messages")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{name}[{index}].text must be a string", "messages")
        parts.append({"type": "text", "text": part["text"]})
    return parts


def _tool(tool: Any, where: str, field: str) -> dict[str, Any]:
    kind = tool.get("type", "function") if field == "tools" and isinstance(tool, dict) else "function"
    if kind not in ("function", "custom"):
        message = f"{where} has type {str(kind)[:32]!r}; only 'function' and 'custom' are known"
        raise RequestError(message, field, "invalid_value")
    function = tool.get(kind) if field == "tools" and isinstance(tool, dict) else tool
    if not isinstance(function, dict):
        message = f"{where} must be an object with a {kind}, not {kind_of(tool)}"
        raise RequestError(message, field, "invalid_type")
    if kind == "custom":
        function = _of_text(function)
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


def _of_text(custom: dict[str, Any]) -> dict[str, Any]:
    """A custom tool as a function. The model reads the grammar of its input, but nothing enforces it."""
    form = custom.get("format")
    grammar = form.get("grammar", form) if isinstance(form, dict) else {}
    definition = grammar.get("definition") if isinstance(grammar, dict) else None
    parts = [custom.get("description"), f"The input follows this grammar:\n{definition}" if definition else None]
    description = "\n\n".join(text for text in parts if isinstance(text, str) and text)
    return {"name": custom.get("name"), "description": description, "parameters": TEXT_SCHEMA}
