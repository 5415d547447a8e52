"""What a body of /v1/chat/completions asks for. It reads and checks; the prompt is rendered elsewhere."""

from dataclasses import dataclass
from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.requests.json_body import kind_of
from ckdist.serve.requests.fields import Fields
from ckdist.serve.requests.sampling import ACCEPTED, KNOWN, MAX_LOGPROBS, Asked, read_asked

MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
OWN = frozenset("messages max_completion_tokens logprobs top_logprobs chat_template_kwargs add_generation_prompt tools tool_choice modalities".split())
UNSUPPORTED = {
    "functions": "",
    "function_call": "",
    "audio": "",
    "prediction": "",
    "web_search_options": "",
    "grammar": "",
    "json_schema": "",
}
RESERVED_KWARGS = frozenset("messages tools template add_generation_prompt bos_token eos_token".split())


@dataclass(frozen=True)
class ChatRequest:
    """`messages` are ready for a chat template; `logprobs` is the number of alternatives, None without logprobs."""

    asked: Asked
    messages: list[dict[str, Any]]
    logprobs: int | None
    template_kwargs: dict[str, Any]
    add_generation_prompt: bool


def parse_chat(body: dict[str, Any], vocab_size: int) -> ChatRequest:
    """RequestError for anything that cannot be meant or is not supported."""
    fields = Fields(body)
    fields.refuse_unknown(KNOWN | ACCEPTED | OWN, UNSUPPORTED)
    _refuse_tools(fields)
    modalities = fields.value("modalities", list)
    if modalities is not None and modalities != ["text"]:
        raise RequestError("modalities other than ['text'] are not supported", "modalities")
    newer = fields.integer("max_completion_tokens", None, 1, 1 << 31)
    older = fields.integer("max_tokens", None, 1, 1 << 31)
    wants_logprobs = fields.switch("logprobs")
    top = fields.integer("top_logprobs", None, 0, MAX_LOGPROBS)
    if top is not None and not wants_logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    kwargs = fields.value("chat_template_kwargs", dict) or {}
    for name in kwargs:
        if name in RESERVED_KWARGS or not name.isidentifier() or name.startswith("_"):
            raise RequestError(f"chat_template_kwargs cannot set {name[:64]!r}", "chat_template_kwargs")
    return ChatRequest(
        asked=read_asked(fields, newer if newer is not None else older, vocab_size),
        messages=_messages(fields),
        logprobs=(top or 0) if wants_logprobs else None,
        template_kwargs=kwargs,
        add_generation_prompt=fields.switch("add_generation_prompt", True),
    )


def _messages(fields: Fields) -> list[dict[str, Any]]:
    given = fields.value("messages", list)
    if not given:
        raise RequestError("messages is needed and must hold at least one message", "messages")
    if len(given) > MAX_MESSAGES:
        raise RequestError(f"messages has {len(given)} messages; at most {MAX_MESSAGES} are read", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def _message(message: Any, name: str) -> dict[str, Any]:
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
    return {**message, "role": role, "content": content if content is not None else ""}


def _content(content: Any, name: str) -> str | None:
    """Plain text, or the joined texts of a list of parts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{name} must be a string or a list of parts, not {kind_of(content)}", "messages")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise RequestError(f"{name}[{index}] must be an object with a type", "messages")
        if part["type"] != "text":
            raise RequestError(f"{name}[{index}] has type {part['type'][:32]!r}; only 'text' is supported", "messages")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{name}[{index}].text must be a string", "messages")
        texts.append(part["text"])
    return "".join(texts)


def _refuse_tools(fields: Fields) -> None:
    choice = fields.value("tool_choice", str, dict)
    if fields.value("tools", list) and choice != "none":
        raise RequestError("tools are not supported yet; leave them out, or set tool_choice to 'none'", "tools")
