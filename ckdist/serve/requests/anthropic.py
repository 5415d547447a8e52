"""A body of Anthropic's /v1/messages as one of /v1/chat/completions."""

import json
from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.requests.fields import Fields
from ckdist.tokens.chat_input import kind_of

SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "thinking", "metadata")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
READ = frozenset([*SAME, "system", "messages", "stop_sequences", "tools", "tool_choice", "anthropic_version"])
# What says how others charge for, or keep, a request.
INERT = frozenset(["service_tier", "container", "inference_geo", "context_management", "cache_control"])


def to_chat(body: dict[str, Any], needs_max_tokens: bool = True) -> dict[str, Any]:
    """RequestError for what is not as Anthropic has it. Fields that are not known here stay as they are."""
    fields = Fields(body)
    if needs_max_tokens and fields.value("max_tokens", int) is None:
        raise RequestError("max_tokens is needed", "max_tokens", "missing_required_parameter")
    given = fields.value("messages", list)
    if not given:
        raise RequestError("messages is needed and must hold at least one message", "messages")
    messages = [part for index, message in enumerate(given) for part in _messages(message, f"messages[{index}]")]
    system = _text(fields.value("system", str, list), "system")
    chat = {name: body[name] for name in SAME if body.get(name) is not None}
    chat["messages"] = [{"role": "system", "content": system}, *messages] if system else messages
    stops = fields.value("stop_sequences", list)
    if stops:
        chat["stop"] = stops
    chat |= _tools(fields)
    return chat | {name: value for name, value in body.items() if name not in READ and name not in INERT}


def _tools(fields: Fields) -> dict[str, Any]:
    tools = []
    for index, tool in enumerate(fields.value("tools", list) or ()):
        if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
            raise RequestError(f"tools[{index}] is none of the client's own; only those are known", "tools")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        more = {name: tool[name] for name in ("description", "strict") if name in tool}
        tools.append({"type": "function", "function": {**function, **more}})
    found: dict[str, Any] = {"tools": tools} if tools else {}
    choice = Fields(fields.value("tool_choice", dict) or {})
    kind = choice.text("type", "auto")
    if kind == "tool":
        found["tool_choice"] = {"type": "function", "function": {"name": choice.text("name")}}
    elif kind not in CHOICES:
        raise RequestError(f"tool_choice.type ({kind[:32]!r}) must be one of auto, any, tool, none", "tool_choice")
    else:
        found["tool_choice"] = CHOICES[kind]
    if choice.switch("disable_parallel_tool_use"):
        found["parallel_tool_calls"] = False
    return found


def _messages(message: Any, where: str) -> list[dict[str, Any]]:
    """One message as OpenAI's, which has results of tools as messages of their own."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise RequestError(f"{where} must be an object with the role user or assistant", "messages")
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of blocks", "messages")
    texts, calls, results, thoughts = list[str](), [], [], list[str]()
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(_string(block.get("text"), f"{where}.content[{index}].text"))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            text = _text(block.get("content"), f"{where}.content[{index}].content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text or ""})
        elif kind == "thinking":
            thoughts.append(_string(block.get("thinking"), f"{where}.content[{index}].thinking"))
        elif kind != "redacted_thinking":
            raise RequestError(f"{where}.content[{index}] has type {str(kind)[:32]!r}, which is not known", "messages")
    own: dict[str, Any] = {"role": role, "content": "\n".join(texts) if texts or not calls else None}
    own |= {"tool_calls": calls} if calls else {}
    own |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return [*results, *([own] if texts or calls or not results else [])]


def _text(content: Any, where: str) -> str | None:
    """A text, or blocks of text joined."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{where} must be a string or a list of blocks, not {kind_of(content)}", where.split("[", maxsplit=1)[0]
        )
    texts = []
    for block in content:
        if not isinstance(block, dict) or block.get("type") != "text":
            raise RequestError(f"{where} may hold blocks of text alone", where.split("[", maxsplit=1)[0])
        texts.append(_string(block.get("text"), where))
    return "\n".join(texts)


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where} must be a string, not {kind_of(value)}", where.split("[", maxsplit=1)[0])
    return value
