"""Converts a body of Anthropic's /v1/messages to one of /v1/chat/completions."""

import json
from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.requests.request_fields import Fields
from ckdist.serve.requests.responses import item_text
from ckdist.tokens.chat_input import kind_of

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
READ = frozenset(
    ["system", "messages", "stop_sequences", "tools", "tool_choice", "output_config", "output_format"]
)  # all other fields are those of a chat
# Predefined tools that a client runs: start of the type -> published parameters.
CLIENT_TOOLS: dict[str, dict[str, Any]] = {
    "bash_": {"properties": {"command": {"type": "string"}, "restart": {"type": "boolean"}}},
    "text_editor_": {
        "properties": {
            "command": {"enum": ["view", "create", "str_replace", "insert"]},
            "path": {"type": "string"},
            "view_range": {"type": "array", "items": {"type": "integer"}},
            "file_text": {"type": "string"},
            "old_str": {"type": "string"},
            "new_str": {"type": "string"},
            "insert_line": {"type": "integer"},
            "insert_text": {"type": "string"},
        },
        "required": ["command", "path"],
    },
}
MAX_KIND = 32  # characters of a type that are shown
# Blocks that a provider's own tools leave in the history.
SERVED = ("server_tool_use", "mcp_tool_use", "mcp_tool_result", "tool_reference", "compaction")
SERVED_RESULT = "_tool_result"


def to_chat(body: dict[str, Any], needs_max_tokens: bool = True) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the chat, and the types of the tools that are left out of it.

    Unknown fields stay as they are. Raises RequestError if the body does not have Anthropic's format.
    """
    fields = Fields(body)
    if needs_max_tokens and fields.value("max_tokens", int) is None:
        raise RequestError("max_tokens is needed", "max_tokens", "missing_required_parameter")
    given = fields.value("messages", list)
    if not given:
        raise RequestError("messages is needed and must hold at least one message", "messages")
    messages = [part for index, message in enumerate(given) for part in _messages(message, f"messages[{index}]")]
    system = _text(fields.value("system", str, list), "system")
    chat = {name: value for name, value in body.items() if name not in READ}
    chat["messages"] = [{"role": "system", "content": system}, *messages] if system else messages
    stops = fields.value("stop_sequences", list)
    if stops:
        chat["stop"] = stops
    tools, skipped = _tools(fields)
    return chat | tools | _output(fields), skipped


def _output(fields: Fields) -> dict[str, Any]:
    """Returns the chat's fields for the format of the answer and for the effort."""
    config = fields.inner("output_config")
    effort = config.text("effort")
    found: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    forms = {"output_config.format": config.value("format", dict), "output_format": fields.value("output_format", dict)}
    given = {name: form for name, form in forms.items() if form is not None}
    if len(given) > 1:
        raise RequestError("output_config.format and output_format say the same; give one", "output_format")
    for name, form in given.items():
        if form.get("type") != "json_schema":
            raise RequestError(f"{name}.type must be json_schema", name, "unsupported_value")
        found["response_format"] = {
            "type": "json_schema",
            "json_schema": {"schema": form.get("schema"), "strict": True},
        }
    return found


def _tools(fields: Fields) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the chat's fields for tools and their choice, and the types of tools that only a provider can run."""
    tools, skipped = [], []
    for index, tool in enumerate(fields.value("tools", list) or ()):
        kind = tool.get("type") or "custom" if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or not isinstance(kind, str):
            raise RequestError(f"tools[{index}] must be an object, with a type that is a string", "tools")
        known = next((schema for begin, schema in CLIENT_TOOLS.items() if kind.startswith(begin)), None)
        if kind != "custom" and known is None:
            skipped.append(kind[:MAX_KIND])
            continue
        function = {"name": tool.get("name"), "parameters": known or tool.get("input_schema")}
        more = {name: tool[name] for name in ("description", "strict") if name in tool}
        tools.append({"type": "function", "function": {**function, **more}})
    found: dict[str, Any] = {"tools": tools} if tools else {}
    choice = fields.inner("tool_choice")
    kind = choice.text("type", "auto")
    if kind == "tool":
        found["tool_choice"] = {"type": "function", "function": {"name": choice.text("name")}}
    elif kind not in CHOICES:
        raise RequestError(f"tool_choice.type ({kind[:32]!r}) must be one of auto, any, tool, none", "tool_choice")
    else:
        found["tool_choice"] = CHOICES[kind]
    if choice.switch("disable_parallel_tool_use"):
        found["parallel_tool_calls"] = False
    return found, tuple(dict.fromkeys(skipped))


def _messages(message: Any, where: str) -> list[dict[str, Any]]:
    """Converts one message. In OpenAI's format, results of tools are messages of their own."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise RequestError(f"{where} must be an object with the role user or assistant", "messages")
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of blocks", "messages")
    texts, calls, results, thoughts = list[str](), [], [], list[str]()
    for index, block in enumerate(content):
        kind, place = block.get("type") if isinstance(block, dict) else None, f"{where}.content[{index}]"
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            text = _text(block.get("content"), f"{place}.content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text or ""})
        elif kind == "thinking":
            thoughts.append(_string(block.get("thinking"), f"{place}.thinking"))
        elif kind != "redacted_thinking":
            texts.append(_block(block, place))
    own: dict[str, Any] = {"role": role, "content": "\n".join(texts) if texts or not calls else None}
    own |= {"tool_calls": calls} if calls else {}
    own |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return [*results, *([own] if texts or calls or not results else [])]


def _text(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, f"must be a string or a list of blocks, not {kind_of(content)}")
    return "\n".join(_block(block, f"{where}[{index}]") for index, block in enumerate(content))


def _block(block: Any, where: str) -> str:
    """Returns the text of a content block. Raises RequestError for an unsupported block."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return _string(block.get("text"), f"{where}.text")
    if kind in ("document", "search_result"):
        citations = block.get("citations")
        if isinstance(citations, dict) and citations.get("enabled"):
            raise _wrong(f"{where}.citations", "are not supported by this server; leave them out")
        return _document(block, where) if kind == "document" else _found(block, where)
    if kind in SERVED or (isinstance(kind, str) and kind.endswith(SERVED_RESULT)):
        return item_text(block)
    raise _wrong(where, f"has type {str(kind)[:MAX_KIND]!r}, which is not known")


def _document(block: dict[str, Any], where: str) -> str:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("text", "content"):
        told = f"has type {str(kind)[:MAX_KIND]!r}; only documents of type 'text' and 'content' are read"
        raise _wrong(f"{where}.source", told)
    if kind == "text":
        text = _string(source.get("data"), f"{where}.source.data")
    else:
        text = _text(source.get("content"), f"{where}.source.content") or ""
    told = [_string(block[name], f"{where}.{name}") for name in ("title", "context") if block.get(name)]
    return "\n".join([*told, text])


def _found(block: dict[str, Any], where: str) -> str:
    told = [_string(block[name], f"{where}.{name}") for name in ("title", "source") if block.get(name)]
    return "\n".join([*told, _text(block.get("content"), f"{where}.content") or ""])


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, f"must be a string, not {kind_of(value)}")
    return value


def _wrong(where: str, text: str) -> RequestError:
    return RequestError(f"{where} {text}", where.split("[", maxsplit=1)[0])
