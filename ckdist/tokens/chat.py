"""Chat templates: the jinja2 programs in model files that write a list of messages as one prompt.

The text that comes out is encoded with special tokens parsed and without adding any (`encode(text, add_special=False)`), as
transformers and llama-server do: the template puts its control tokens, BOS included, itself. It follows that a user who writes a
control token's text in a message gets that control token; a server that must not allow it refuses such text before it renders.
"""

from collections.abc import Mapping, Sequence

from jinja2.exceptions import TemplateError

from ckdist.errors import ModelFileError, RequestError
from ckdist.tokens.sandbox import ChatEnvironment

MAX_TEMPLATE = 256 << 10  # characters
MAX_OUTPUT = 16 << 20  # characters


class ChatTemplate:
    """One model's templates by name: `default`, and where the model has it `tool_use` for requests with tools.

    `special_tokens` are the texts that templates call bos_token, eos_token and so on. Compiled at first use.
    """

    def __init__(self, templates: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None):
        self.sources = {"default": templates} if isinstance(templates, str) else dict(templates)
        self.special_tokens = {"bos_token": "", "eos_token": "", **(special_tokens or {})}
        for name, source in self.sources.items():
            if len(source) > MAX_TEMPLATE:
                raise ModelFileError(f"chat template {name!r} has {len(source)} characters; at most {MAX_TEMPLATE} are allowed")
        self._environment = ChatEnvironment()
        self._compiled = {}

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        template: str | None = None,
        **variables: object,
    ) -> str:
        """The prompt for `messages`, each with a `role` and a `content` of text or of text parts.

        `template` names one of several; without it, tools choose `tool_use` where there is one. `variables` (enable_thinking and
        the like) reach the template as they are. Raises RequestError for messages that the template refuses or cannot render.
        """
        name = template or ("tool_use" if tools and "tool_use" in self.sources else "default")
        if name not in self.sources:
            raise RequestError(f"the model has no chat template {name!r}; it has {', '.join(sorted(self.sources)) or 'none'}")
        messages = [_plain(message, index) for index, message in enumerate(messages)]
        context = {**self.special_tokens, **variables, "messages": messages, "tools": list(tools) if tools else None}
        context |= {"documents": variables.get("documents"), "add_generation_prompt": add_generation_prompt}
        parts, size = [], 0
        try:
            for part in self._environment.generate(self._compile(name), context):
                size += len(part)
                if size > MAX_OUTPUT:
                    raise RequestError(f"the chat template writes more than {MAX_OUTPUT} characters; send shorter messages", "messages")
                parts.append(part)
        except TemplateError as error:
            raise RequestError(f"the chat template refuses the messages: {_one_line(error)}", "messages") from None
        except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
            raise RequestError(f"the chat template fails on the messages: {_one_line(error)}", "messages") from None
        return "".join(parts)

    def _compile(self, name: str):
        if name not in self._compiled:
            try:
                self._compiled[name] = self._environment.from_string(self.sources[name])
            except (TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
                raise RequestError(f"the model's chat template is broken: {_one_line(error)}; use /v1/completions") from None
        return self._compiled[name]


def _plain(message: Mapping[str, object], index: int) -> dict[str, object]:
    """`message` with its content as one string: text parts joined, null as nothing."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] has no role; give each message a role and a content", "messages")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        texts = []
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise RequestError(f"messages[{index}] has a content part of type {kind!r}; this model reads only 'text'", "messages")
            texts.append(part["text"])
        content = "".join(texts)
    elif content is not None and not isinstance(content, str):
        raise RequestError(f"messages[{index}].content is of type {type(content).__name__}; give a string or text parts", "messages")
    return {**message, "content": content or ""}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
