"""Prepares a body of /v1/chat/completions: reads its fields, and renders and tokenises its prompt."""

from dataclasses import replace
from typing import Any

from msgspec import structs

from ckdist.engine.sampling_params import MAX_LOGPROBS
from ckdist.errors import RequestError
from ckdist.serve.requests.answer_form import answer_form, answer_grammar
from ckdist.serve.requests.params import read_params, with_prompts
from ckdist.serve.requests.prompt import tokenise_chat
from ckdist.serve.requests.request_fields import Fields, wrong
from ckdist.serve.requests.thinking import read_template_variables, read_thinking_budget
from ckdist.serve.requests.tools import Tools, history_call, read_tools
from ckdist.serve.text_records import ModelFacts, Prepared
from ckdist.tokens.chat_input import read_message
from ckdist.tokens.control_text import RenderedChat
from ckdist.tokens.tokenizer import Tokenizer

MAX_MESSAGES = 4096
UNLIMITED = -1
REASONING_FORMATS = ("none", "auto", "deepseek")


def chat(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of /v1/chat/completions for the engine."""
    fields = Fields(body)
    tools, work = _read(fields, tokenizer, facts)
    rendered = _render(fields, tools, tokenizer, facts)
    tokens = tokenise_chat(tokenizer, rendered, fields.switch("add_special_tokens"), facts)
    splits, budget = _reasoning(fields, facts)
    form = answer_form(tokenizer, rendered.text, tools, splits)
    sampling = work.sampling
    if (budget or 0) >= min(sampling.max_tokens, facts.context_length):
        budget = None
    grammar = answer_grammar(tokenizer, form, tools, sampling.grammar, budget)
    work = structs.replace(work, sampling=replace(sampling, grammar=grammar), answer=form)
    return with_prompts(work, [tokens], facts, "messages")


def apply_template(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> dict[str, Any]:
    """Renders a chat for llama-server's /apply-template, as the text that the model would continue."""
    return {"prompt": rendered_chat(Fields(body), tokenizer, facts).text}


def rendered_chat(fields: Fields, tokenizer: Tokenizer, facts: ModelFacts) -> RenderedChat:
    """Returns a chat as text. Raises RequestError for invalid fields, those of the answer too."""
    tools, _ = _read(fields, tokenizer, facts)
    return _render(fields, tools, tokenizer, facts)


def template_variables(fields: Fields) -> dict[str, Any]:
    """Returns the variables of the template."""
    # Without the second field the template decides whether to continue an assistant message at the end.
    continues = fields.value("continue_final_message", bool)
    return read_template_variables(fields) | ({} if continues is None else {"continue_final_message": continues})


def _read(fields: Fields, tokenizer: Tokenizer, facts: ModelFacts) -> tuple[Tools, Prepared]:
    """Reads all fields but those of the prompt. Raises RequestError for invalid and unsupported values."""
    facts.check_continues("chat")
    tools = read_tools(fields)
    _reasoning(fields, facts)
    return tools, read_params(fields, tokenizer, facts, _logprobs(fields), least_tokens=1)


def _reasoning(fields: Fields, facts: ModelFacts) -> tuple[bool, int | None]:
    """Returns whether reasoning is separated from content, and the maximum number of its tokens, if any."""
    splits, budget = _splits_reasoning(fields), read_thinking_budget(fields)
    if budget is None:
        return splits, facts.defaults.thinking_budget if splits else None
    if budget == UNLIMITED:
        return splits, None
    if not splits:
        message = "a thinking budget needs reasoning that is separate from content; leave out reasoning_format"
        raise RequestError(message, "reasoning_format", "invalid_value")
    return splits, budget


def _render(fields: Fields, tools: Tools, tokenizer: Tokenizer, facts: ModelFacts) -> RenderedChat:
    template = tokenizer.chat_template
    assert template is not None, "with_template gives every served model one"
    return template.prompt(
        None if facts.special_in_text else tokenizer.control_text,
        _messages(fields),
        add_generation_prompt=fields.switch("add_generation_prompt", True),
        tools=tools.given,
        **facts.defaults.template_variables | template_variables(fields),
    )


def _logprobs(fields: Fields) -> int | None:
    """Alternatives per token; None without log-probabilities. `n_probs` is llama-server's name for both fields."""
    wanted = fields.switch("logprobs")
    top = fields.integer("top_logprobs", None, 0, MAX_LOGPROBS)
    if top and not wanted:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs", "invalid_value")
    n_probs = fields.integer("n_probs", 0, 0, MAX_LOGPROBS)
    return top or n_probs if wanted else n_probs or None


def _splits_reasoning(fields: Fields) -> bool:
    """True to separate reasoning from content. `reasoning_format` is llama-server's."""
    given = fields.text("reasoning_format", "auto")
    if given not in REASONING_FORMATS:
        raise wrong("reasoning_format", f"({given[:32]!r}) must be one of {', '.join(REASONING_FORMATS)}")
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
