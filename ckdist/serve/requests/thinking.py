"""Reads the variables of the chat template.

They come from chat_template_kwargs, and from many APIs' fields for thinking, effort and verbosity.
"""

from collections.abc import Iterable
from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.requests.request_fields import Fields, wrong
from ckdist.tokens.chat_input import kind_of

RESERVED = frozenset(
    ["messages", "tools", "template", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"]
)  # variables of a template that no client and no flag may set
MAX_EFFORT_CHARS = 32
NO_EFFORT = "none"
MAX_BUDGET = 1 << 31
BUDGETS = (
    "thinking_budget_tokens",
    "thinking_budget",
    "thinking_token_budget",
    "reasoning_budget_tokens",
    "reasoning_budget",
)  # of llama-server, vLLM and others; -1: no budget
SWITCHES = {
    "enabled": True,
    "adaptive": True,
    "disabled": False,
}  # thinking.type as Anthropic, DeepSeek and GLM write it


def reserved_variable(names: Iterable[str]) -> str | None:
    """Returns the first of `names` that is reserved or no name of a variable, or None."""
    return next((name for name in names if name in RESERVED or not name.isidentifier() or name.startswith("_")), None)


def read_template_variables(fields: Fields) -> dict[str, Any]:
    """Returns the template's variables. chat_template_kwargs replace other fields.

    The names are `enable_thinking` (Qwen and most others), `thinking` (DeepSeek, Granite), `reasoning_effort`
    (gpt-oss), `verbosity` and `documents`. A template ignores variables that it does not read.
    """
    kwargs = fields.value("chat_template_kwargs", dict) or {}
    if name := reserved_variable(kwargs):
        raise wrong("chat_template_kwargs", f"cannot set {name[:64]!r}")
    variables: dict[str, Any] = {}
    documents = fields.value("documents", list)
    if documents:
        variables["documents"] = documents
    switch, effort = _switch(fields), _effort(fields)
    if switch is None and effort == NO_EFFORT:
        switch = False
    if switch is not None:
        variables |= {"enable_thinking": switch, "thinking": switch}
    if effort not in (None, NO_EFFORT):
        variables["reasoning_effort"] = effort
    verbosity = _word(fields, "verbosity")
    if verbosity is not None:
        variables["verbosity"] = verbosity
    return variables | kwargs


def read_thinking_budget(fields: Fields) -> int | None:
    """Returns the maximum number of reasoning tokens; -1: no limit; None: the request does not say.

    `thinking.budget_tokens` is Anthropic's, `reasoning.max_tokens` OpenRouter's.
    """
    thinking = fields.value("thinking", bool, dict, str)
    inner = Fields(thinking if isinstance(thinking, dict) else {}, "thinking")
    budget = inner.integer("budget_tokens", None, 0, MAX_BUDGET)
    if budget is None:
        budget = fields.inner("reasoning").integer("max_tokens", None, 0, MAX_BUDGET)
    if budget is None:
        budget = fields.integer(BUDGETS, None, -1, MAX_BUDGET)
    return budget


def _switch(fields: Fields) -> bool | None:
    """True to think, False not to; None if the request does not say. `think` is Ollama's."""
    found = None
    reasoning = fields.inner("reasoning")
    if reasoning.value("enabled", bool) is not None:
        found = reasoning.switch("enabled")
    for name in ("think", "thinking", "enable_thinking"):
        given = fields.value(name, bool, dict, str)
        if isinstance(given, bool):
            found = given
        elif isinstance(given, dict):
            kind = Fields(given, name).text("type")
            if kind is None:
                continue
            if kind not in SWITCHES:
                message = f"{name}.type ({kind[:32]!r}) must be one of {', '.join(SWITCHES)}"
                raise RequestError(message, name, "invalid_value")
            found = SWITCHES[kind]
        elif given is not None and name != "think":
            raise wrong(name, f"must be a boolean or an object, not {kind_of(given)}", "invalid_type")
    return found


def _effort(fields: Fields) -> str | None:
    """The effort: `reasoning_effort`, `reasoning.effort` (OpenRouter's), or a word in Ollama's `think`."""
    reasoning = fields.inner("reasoning")
    think = fields.value("think", bool, dict, str)
    effort = _word(fields, "reasoning_effort") or _word(reasoning, "effort")
    return effort or (_word(fields, "think") if isinstance(think, str) else None)


def _word(fields: Fields, name: str) -> str | None:
    word = fields.text(name)
    if word is not None and len(word) > MAX_EFFORT_CHARS:
        raise wrong(name, f"has {len(word)} characters; at most {MAX_EFFORT_CHARS} are read")
    return word
