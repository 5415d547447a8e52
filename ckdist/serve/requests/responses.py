"""Converts a body of OpenAI's /v1/responses to one of /v1/chat/completions."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from ckdist.errors import RequestError
from ckdist.serve.requests.request_fields import Fields
from ckdist.serve.requests.tools import TEXT
from ckdist.tokens.chat_input import kind_of

READ = frozenset(["input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "include", "metadata"])
TEXTS = ("input_text", "output_text", "text", "refusal")
PICTURES = ("input_image", "input_file", "computer_screenshot")
LOGPROBS = "message.output_text.logprobs"
OWN = ("function", "custom")  # types of tools that the client runs
MAX_KIND = 32  # characters of a type that are shown
OUTPUT, CALL = "_call_output", "_call"  # endings of types of items
LEFT_OUT = ("type", "id", "status", "cache_control", "result")  # `result` is a generated picture
# Fields that the answer repeats, with their defaults.
ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "store": True,
    "reasoning": None,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
}


def echoed(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the request that the answer repeats. Raises RequestError for a number of over 64 bits."""
    fields = {name: default if body.get(name) is None else body[name] for name, default in ECHOED.items()}
    for name, value in fields.items():
        try:
            msgspec.msgpack.encode(value)  # as the answer's process receives it
        except OverflowError:
            raise RequestError(f"{name} has a whole number of more than 64 bits", name, "invalid_value") from None
    return fields


def to_chat(body: dict[str, Any], history: list[Any] | None = None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the chat, and the types of the tools that are left out of it.

    `history`: the kept items that come before the input. Raises RequestError if the body does not have OpenAI's format.
    """
    fields = Fields(body)
    given = fields.value("input", str, list)
    if given is None:
        raise RequestError("input is needed: a text, or a list of items", "input", "missing_required_parameter")
    for name in ("previous_response_id", "conversation"):
        if history is None and fields.body.get(name) is not None:
            raise RequestError(f"{name} is for POST /v1/responses alone, and its name must not be escaped", name)
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = History().read(items, history or ())
    instructions = fields.text("instructions")
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    if LOGPROBS in (fields.value("include", list) or ()):
        raise RequestError(f"include cannot have {LOGPROBS!r}; /v1/chat/completions has logprobs", "include")
    chat = {name: value for name, value in body.items() if name not in READ}
    chat["messages"] = messages or [{"role": "user", "content": ""}]  # some clients send this to try the connection
    most = fields.integer("max_output_tokens", None, 1, 1 << 31)
    chat |= {"max_tokens": most} if most is not None else {}
    tools, skipped = _tools(fields)
    return chat | tools | _text(fields), skipped


class History:
    """Converts the items of an input to messages of a chat."""

    def __init__(self, field: str = "input") -> None:
        self._field = field
        self._messages: list[dict[str, Any]] = []
        self._thought = ""  # of the message or call that comes next

    def read(self, items: list[Any], before: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Converts the kept items `before`, and `items`.

        Raises RequestError for unknown items, and for items that are not text.
        """
        for index, item in enumerate([*before, *items], -len(before)):
            where = f"{self._field}[{index}]" if index >= 0 else "a kept item"
            if not isinstance(item, dict):
                raise RequestError(f"{where} must be an object, not {kind_of(item)}", "input")
            self._add(item, str(item.get("type", "message")), where)
        return self._messages

    def _add(self, item: dict[str, Any], kind: str, where: str) -> None:
        if kind == "message":
            if item.get("role") == "assistant":
                self._assistant(_content(item.get("content"), where))
            else:
                self._messages.append({"role": item.get("role"), "content": _content(item.get("content"), where)})
        elif kind == "reasoning":
            parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
            texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
            self._thought = "\n".join(texts)
        elif kind.endswith(OUTPUT):
            text = _output(item.get("output"), where)
            self._messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        elif kind.endswith(CALL) and item.get("call_id") is not None:
            self._call(item, kind)
        elif kind.endswith(CALL) or kind.startswith("mcp_"):
            self._assistant(item_text({**item, "type": kind}))
        else:
            raise RequestError(f"{where} has type {kind[:32]!r}, which is not known", "input")

    def _assistant(self, content: str | None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._thought:
            message["reasoning_content"] = self._thought
        self._thought = ""
        self._messages.append(message)
        return message

    def _call(self, item: dict[str, Any], kind: str) -> None:
        """Adds a call that the client answers. Calls that follow one another, or a text, share a message."""
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        elif kind == "custom_tool_call":
            arguments = json.dumps({TEXT: item.get("input")}, ensure_ascii=False)
            function = {"name": item.get("name"), "arguments": arguments}
        else:
            asked = item.get("action") if isinstance(item.get("action"), dict) else {}
            function = {"name": kind.removesuffix(CALL), "arguments": json.dumps(asked, ensure_ascii=False)}
        call = {"id": item["call_id"], "type": "function", "function": function}
        last = self._messages[-1] if self._messages else {}
        message = last if last.get("role") == "assistant" and not self._thought else self._assistant(None)
        message.setdefault("tool_calls", []).append(call)


def _output(output: Any, where: str) -> str:
    """Returns the output of a tool as text. The parts of a list are joined."""
    texts = []
    for part in output if isinstance(output, list) else [output]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in PICTURES:
            raise RequestError(f"{where}.output has type {kind!r}; only text is supported", "input")
        text = part.get("text") if kind in TEXTS and isinstance(part, dict) else part
        texts.append(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False))
    return "\n".join(texts)


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


def _tools(fields: Fields) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the chat's fields for tools and their choice, and the types of tools that only a provider can run."""
    tools, skipped = [], []
    for index, tool in enumerate(fields.value("tools", list) or ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise RequestError(f"tools[{index}] must be an object with a type", "tools")
        if kind in OWN:
            tools.append(_named(tool))
        else:
            skipped.append(kind[:MAX_KIND])
    choice = fields.value("tool_choice", str, dict)
    if isinstance(choice, dict):
        choice = _choice(choice)
    found: dict[str, Any] = {"tools": tools, "tool_choice": choice}
    return {name: value for name, value in found.items() if value}, tuple(dict.fromkeys(skipped))


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    """Raises RequestError for a tool that only a provider can run."""
    kind = choice.get("type")
    if kind == "allowed_tools":
        tools = [tool for tool in choice.get("tools") or () if isinstance(tool, dict) and tool.get("type") in OWN]
        return {"type": kind, kind: {"mode": choice.get("mode", "auto"), "tools": [_named(tool) for tool in tools]}}
    if kind in OWN:
        return _named(choice)
    raise RequestError(f"tool_choice names {str(kind)[:MAX_KIND]!r}, which is not run here", "tool_choice")


def _named(tool: dict[str, Any]) -> dict[str, Any]:
    """Moves the fields of a tool, or of a reference to it, into an object as chats have it."""
    kind = tool["type"]
    return {"type": kind, kind: {name: value for name, value in tool.items() if name != "type"}}


def _text(fields: Fields) -> dict[str, Any]:
    text = fields.inner("text")
    verbosity, form = text.text("verbosity"), text.value("format", dict)
    found = {} if verbosity is None else {"verbosity": verbosity}
    if form is not None and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    return found if form is None else {**found, "response_format": form}


def item_text(item: dict[str, Any]) -> str:
    """Returns the text of an item that no chat template knows, as a call of a provider's own tool, or its result.

    It has the item's type, and the fields that a model can read as JSON.
    """
    told = json.dumps(_readable({key: value for key, value in item.items() if key not in LEFT_OUT}), ensure_ascii=False)
    return f"[{item['type']} {told}]"


def _readable(value: Any) -> Any:
    """Returns `value` without encrypted fields, which only its provider can read."""
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items() if "encrypted" not in key}
    return [_readable(item) for item in value] if isinstance(value, list) else value
