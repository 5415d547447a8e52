"""What a body of /v1/chat/completions asks for. It reads and checks; the prompt is rendered elsewhere."""

from dataclasses import dataclass
from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.requests.fields import Fields
from ckdist.serve.requests.json_body import kind_of
from ckdist.serve.requests.params import MAX_LOGPROBS, RequestParams, read_params
from ckdist.serve.requests.prepared import ModelFacts
from ckdist.serve.requests.thinking import read_template_variables, read_thinking_budget
from ckdist.serve.requests.tools import Tools, history_call, read_tools
from ckdist.tokens.tokenizer import Tokenizer

MAX_MESSAGES = 4096
REASONING_FORMATS = ("none", "auto", "deepseek")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True)
class ChatRequest:
    """`messages` are ready for a chat template; `template_kwargs` are its further variables.

    `split_reasoning`: what the model thinks is no part of the answer's content. `thinking_budget`: the tokens that it
    may think; None where the answer's length alone is the limit.
    """

    params: RequestParams
    messages: list[dict[str, Any]]
    template_kwargs: dict[str, Any]
    add_generation_prompt: bool
    add_special_tokens: bool
    tools: Tools
    split_reasoning: bool
    thinking_budget: int | None


def parse_chat(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> ChatRequest:
    """RequestError for anything that cannot be meant or is not supported."""
    facts.check_continues("chat")
    fields = Fields(body)
    tools = read_tools(fields)
    messages = _messages(fields)
    split_reasoning = _splits_reasoning(fields)
    variables = read_template_variables(fields) | _continuation(fields)
    budget = read_thinking_budget(fields)
    if budget is not None and not split_reasoning:
        message = "a budget of thinking needs reasoning to be told from content; leave out reasoning_format"
        raise RequestError(message, "reasoning_format", "invalid_value")
    add_generation_prompt = fields.switch("add_generation_prompt", True)
    add_special_tokens = fields.switch("add_special_tokens")
    params = read_params(fields, tokenizer, facts, _logprobs(fields), least_tokens=1)
    more = (add_generation_prompt, add_special_tokens, tools, split_reasoning, budget)
    return ChatRequest(params, messages, variables, *more)


def _continuation(fields: Fields) -> dict[str, Any]:
    """Whether the last message, the assistant's, is to be continued; what was not said is the template's to decide."""
    continues = fields.value("continue_final_message", bool)
    return {} if continues is None else {"continue_final_message": continues}


def _logprobs(fields: Fields) -> int | None:
    """Alternatives per token, None without log-probabilities; `n_probs` is llama-server's name for both fields."""
    wanted = fields.switch("logprobs")
    top = fields.integer("top_logprobs", None, 0, MAX_LOGPROBS)
    if top and not wanted:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs", "invalid_value")
    n_probs = fields.integer("n_probs", 0, 0, MAX_LOGPROBS)
    return top or n_probs if wanted else n_probs or None


def _splits_reasoning(fields: Fields) -> bool:
    """Whether reasoning is told from content; `reasoning_format` is llama-server's."""
    given = fields.text("reasoning_format", "auto")
    if given not in REASONING_FORMATS:
        message = f"reasoning_format ({given[:32]!r}) must be one of {', '.join(REASONING_FORMATS)}"
        raise RequestError(message, "reasoning_format", "invalid_value")
    return given != "none"


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
    own = {} if calls is None else {"tool_calls": [history_call(call) for call in calls]}
    return {**message, "role": role, "content": content, **own, **_reasoning(message, name)}


def _reasoning(message: dict[str, Any], name: str) -> dict[str, str]:
    """What the assistant thought, under every name that templates read."""
    for field in ("reasoning_content", "reasoning", "thinking"):
        given = message.get(field)
        if given is not None and not isinstance(given, str):
            raise RequestError(f"{name}.{field} must be a string, not {kind_of(given)}", "messages")
    found = message.get("reasoning_content") or message.get("reasoning") or message.get("thinking")
    return dict.fromkeys(("reasoning_content", "reasoning", "thinking"), found) if found else {}


def _content(content: Any, name: str) -> str | list[dict[str, str]] | None:
    """Plain text, or parts of text alone; the template says whether they are joined."""
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
