"""The variables that a request gives its chat template: those of chat_template_kwargs, and the fields of many APIs that
say whether, and how much, a model is to think before it answers.
"""

from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.requests.fields import Fields
from ckdist.tokens.chat_input import kind_of

RESERVED = frozenset(
    ["messages", "tools", "template", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"]
)
MAX_EFFORT_CHARS = 32
NO_EFFORT = "none"
SWITCHES = {
    "enabled": True,
    "adaptive": True,
    "disabled": False,
}  # thinking.type as Anthropic, DeepSeek and GLM write it


def read_template_variables(fields: Fields) -> dict[str, Any]:
    """`enable_thinking` (Qwen's and most), `thinking` (DeepSeek's, Granite's) and `reasoning_effort` (gpt-oss's) as the
    request's own fields say; what chat_template_kwargs says wins. A template that does not ask for a variable is not
    changed by it.
    """
    kwargs = fields.value("chat_template_kwargs", dict) or {}
    for name in kwargs:
        if name in RESERVED or not name.isidentifier() or name.startswith("_"):
            message = f"chat_template_kwargs cannot set {name[:64]!r}"
            raise RequestError(message, "chat_template_kwargs", "invalid_value")
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
    return variables | kwargs


def _switch(fields: Fields) -> bool | None:
    """Whether to think; None when nothing was said. `think` is Ollama's."""
    found = None
    reasoning = Fields(fields.value("reasoning", dict) or {})
    if reasoning.value("enabled", bool) is not None:
        found = reasoning.switch("enabled")
    if reasoning.switch("exclude"):
        message = "reasoning.exclude is not supported by this server; leave it out"
        raise RequestError(message, "reasoning", "unsupported_value")
    for name in ("think", "thinking", "enable_thinking"):
        given = fields.value(name, bool, dict, str)
        if isinstance(given, bool):
            found = given
        elif isinstance(given, dict):
            kind = Fields(given).text("type", "")
            if kind not in SWITCHES:
                message = f"{name}.type ({kind[:32]!r}) must be one of {', '.join(SWITCHES)}"
                raise RequestError(message, name, "invalid_value")
            found = SWITCHES[kind]
        elif given is not None and name != "think":
            raise RequestError(f"{name} must be a boolean or an object, not {kind_of(given)}", name, "invalid_type")
    return found


def _effort(fields: Fields) -> str | None:
    """How much to think: `reasoning_effort`, `reasoning.effort` (OpenRouter's) or a word in Ollama's `think`."""
    reasoning = Fields(fields.value("reasoning", dict) or {})
    think = fields.value("think", bool, dict, str)
    effort = fields.text("reasoning_effort") or reasoning.text("effort") or (think if isinstance(think, str) else None)
    if effort is not None and len(effort) > MAX_EFFORT_CHARS:
        message = f"reasoning_effort has {len(effort)} characters; at most {MAX_EFFORT_CHARS} are read"
        raise RequestError(message, "reasoning_effort", "invalid_value")
    return effort
