"""Flags of `ckdist serve` for requests that do not say: sampling, length, thinking, and the chat template."""

import json
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, cast

from ckdist.config.options import Settings, changed, option
from ckdist.config.samplers import MAX_INTEGER, SamplingFields
from ckdist.errors import ConfigError

MAX_KWARGS_CHARS = 1 << 14


@dataclass(frozen=True)
class RequestDefaults:
    """Values for requests that do not give their own.

    Attributes:
        sampling: Fields of SamplingParams. A list is made a tuple.
        max_tokens: The limit of an answer; None: that of the kind of request.
        thinking_budget: The limit of reasoning tokens; None: no limit.
        template_variables: Variables of the chat template.
    """

    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    max_tokens: int | None = None
    thinking_budget: int | None = None
    template_variables: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name, value in self.sampling.items():
            if isinstance(value, list):  # from JSON
                self.sampling[name] = tuple(cast("list[str]", value))


def json_object(text: str) -> str:
    """Returns `text` if it is a JSON object. Raises ValueError otherwise."""
    try:
        is_object = len(text) <= MAX_KWARGS_CHARS and isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ValueError(f'is not a JSON object of at most {MAX_KWARGS_CHARS} characters, such as {{"name": true}}')
    return text


# The flags of `SamplingFields`, None without a flag.
SamplingDefaults: Any = make_dataclass(
    "SamplingDefaults",
    [
        (
            item.name,
            item.type,
            changed(SamplingFields, item.name, default=None, help=f"for requests that give none: {help_}"),
        )
        for item in fields(SamplingFields)
        if item.name != "ignore_eos" and (help_ := item.metadata["help"].partition(" (default")[0])
    ],
    bases=(Settings,),
    frozen=True,
    kw_only=True,
)


@dataclass(frozen=True, kw_only=True)
class RequestDefaultFlags(SamplingDefaults):
    """The flags."""

    max_tokens_default: int | None = option(
        None, "-n", "--n-predict", "--max-tokens-default", within=(1, MAX_INTEGER),
        help="for requests without a limit: most tokens of an answer (default: all that fit the context; 16 in "
        "/v1/completions, as OpenAI has it)",
    )  # fmt: skip
    reasoning_budget: int = option(
        -1, within=(-1, MAX_INTEGER), help="for chats without a budget: most tokens of reasoning; 0: none; -1: no limit"
    )
    chat_template_file: str | None = option(None, metavar="FILE.jinja", help="chat template in place of the model's")
    chat_template_kwargs: str | None = option(
        None, parse=json_object, metavar="JSON",
        help="variables of the chat template that requests may replace, e.g. '{\"enable_thinking\": false}'",
    )  # fmt: skip

    def __post_init__(self) -> None:
        Settings.__post_init__(self)  # the base class is made at run time, so super() has no type
        if self.chat_template_kwargs is not None:
            try:
                json_object(self.chat_template_kwargs)
            except ValueError as error:
                raise ConfigError(f"--chat-template-kwargs {error}") from None

    @property
    def request_defaults(self) -> RequestDefaults:
        """The values of the flags."""
        given = {item.name: getattr(self, item.name, None) for item in fields(SamplingFields)}
        return RequestDefaults(
            {name: value for name, value in given.items() if value is not None},
            self.max_tokens_default,
            None if self.reasoning_budget < 0 else self.reasoning_budget,
            json.loads(self.chat_template_kwargs or "{}"),
        )
