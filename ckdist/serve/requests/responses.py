"""A body of OpenAI's /v1/responses as one of /v1/chat/completions."""

import json
from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.requests.fields import Fields
from ckdist.tokens.chat_input import kind_of

KEPT = ("previous_response_id", "conversation", "prompt")  # what a server would have to keep
READ = frozenset(["input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", *KEPT])
TEXTS = ("input_text", "output_text", "text", "refusal")
INERT = frozenset(["include", "truncation", "background", "max_tool_calls"])
# Fields that the answer repeats, with their defaults.
ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
}


def echoed(body: dict[str, Any]) -> dict[str, Any]:
    """What the answer repeats of the request."""
    return {name: default if body.get(name) is None else body[name] for name, default in ECHOED.items()}


def to_chat(body: dict[str, Any]) -> dict[str, Any]:
    """RequestError for what is not as OpenAI has it, and for answers that are not kept here."""
    fields = Fields(body)
    for name in KEPT:
        if fields.value(name, str, dict):
            raise RequestError(f"{name} is not supported, since no answers are kept; send the whole input", name)
    if fields.switch("background"):
        raise RequestError("background is not supported, since no answers are kept; leave it out", "background")
    given = fields.value("input", str, list)
    if not given:
        raise RequestError("input is needed: a text, or a list of items", "input", "missing_required_parameter")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else _messages(given)
    instructions = fields.text("instructions")
    chat = {name: value for name, value in body.items() if name not in READ and name not in INERT}
    chat["messages"] = [{"role": "system", "content": instructions}, *messages] if instructions else messages
    most = fields.integer("max_output_tokens", None, 1, 1 << 31)
    chat |= {"max_tokens": most} if most is not None else {}
    return chat | _tools(fields) | _format(fields)


def _messages(items: list[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise RequestError(f"{where} must be an object, not {kind_of(item)}", "input")
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"), where)})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            last = messages[-1] if messages else {}
            if last.get("role") == "assistant":
                last.setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        elif kind != "reasoning":
            raise RequestError(f"{where} has type {str(kind)[:32]!r}, which is not known", "input")
    return messages


def _content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of parts", "input")
    texts = []
    for part in content:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if not isinstance(part, dict) or part.get("type") not in TEXTS or not isinstance(text, str):
            raise RequestError(f"{where}.content may hold parts of text alone", "input")
        texts.append(text)
    return "\n".join(texts)


def _tools(fields: Fields) -> dict[str, Any]:
    tools = []
    for index, tool in enumerate(fields.value("tools", list) or ()):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise RequestError(f"tools[{index}] is no function; only functions are known", "tools")
        function = dict(tool)
        del function["type"]
        tools.append({"type": "function", "function": function})
    choice = fields.value("tool_choice", str, dict)
    if isinstance(choice, dict) and "name" in choice:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    found: dict[str, Any] = {"tools": tools, "tool_choice": choice}
    return {name: value for name, value in found.items() if value}


def _format(fields: Fields) -> dict[str, Any]:
    text = fields.value("text", dict)
    form = None if text is None else Fields(text).value("format", dict)
    if form is None:
        return {}
    if form.get("type") == "json_schema":
        return {"response_format": {"type": "json_schema", "json_schema": form}}
    return {"response_format": form}
