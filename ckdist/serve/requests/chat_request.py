"""Reads and checks a body of /v1/chat/completions. The prompt is rendered elsewhere."""

from dataclasses import dataclass
from typing import Any

from ckdist.engine.sampling_params import MAX_LOGPROBS
from ckdist.errors import RequestError
from ckdist.serve.requests.params import RequestParams, read_params
from ckdist.serve.requests.prepared import ModelFacts
from ckdist.serve.requests.request_fields import Fields
from ckdist.serve.requests.thinking import read_template_variables, read_thinking_budget
from ckdist.serve.requests.tools import Tools, history_call, read_tools
from ckdist.tokens.chat_input import read_message
from ckdist.tokens.tokenizer import Tokenizer

MAX_MESSAGES = 4096
REASONING_FORMATS = ("none", "auto", "deepseek")


@dataclass(frozen=True)
class ChatRequest:
    """The contents of a body."""

    params: RequestParams
    messages: list[dict[str, Any]]  # ready for a chat template
    template_kwargs: dict[str, Any]  # further variables of the template
    add_generation_prompt: bool
    add_special_tokens: bool
    tools: Tools
    split_reasoning: bool  # separate reasoning from the answer's content
    thinking_budget: int | None  # maximum number of reasoning tokens; None: only the answer's length is limited


def parse_chat(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> ChatRequest:
    """Reads the body. Raises RequestError for invalid and unsupported values."""
    facts.check_continues("chat")
    fields = Fields(body)
    tools = read_tools(fields)
    messages = _messages(fields)
    split_reasoning = _splits_reasoning(fields)
    variables = read_template_variables(fields) | _continuation(fields)
    budget = read_thinking_budget(fields)
    if budget is not None and not split_reasoning:
        message = "a thinking budget needs reasoning that is separate from content; leave out reasoning_format"
        raise RequestError(message, "reasoning_format", "invalid_value")
    add_generation_prompt = fields.switch("add_generation_prompt", True)
    add_special_tokens = fields.switch("add_special_tokens")
    params = read_params(fields, tokenizer, facts, _logprobs(fields), least_tokens=1)
    more = (add_generation_prompt, add_special_tokens, tools, split_reasoning, budget)
    return ChatRequest(params, messages, variables, *more)


def _continuation(fields: Fields) -> dict[str, Any]:
    # Without the field the template decides whether to continue an assistant message at the end.
    continues = fields.value("continue_final_message", bool)
    return {} if continues is None else {"continue_final_message": continues}


def _logprobs(fields: Fields) -> int | None:
    """Alternatives per token; None without log-probabilities. `n_probs` is llama-server's name for both fields."""
    wanted = fields.switch("logprobs")
    top = fields.integer("top_logprobs", None, 0, MAX_LOGPROBS)
    if top and not wanted:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs", "invalid_value")
    n_probs = fields.integer("n_probs", 0, 0, MAX_LOGPROBS)
    return top or n_probs if wanted else n_probs or None


def _splits_reasoning(fields: Fields) -> bool:
    """Whether to separate reasoning from content. `reasoning_format` is llama-server's."""
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
    return [_with_functions(read_message(message, f"messages[{index}]")) for index, message in enumerate(given)]


def _with_functions(message: dict[str, Any]) -> dict[str, Any]:
    """Converts calls of custom tools to calls of functions."""
    calls = message.get("tool_calls")
    return message if calls is None else {**message, "tool_calls": [history_call(call) for call in calls]}
