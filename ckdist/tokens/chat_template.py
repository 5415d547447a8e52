"""Chat templates: the jinja2 programs in model files that write a list of messages as one prompt.

The prompt is encoded with special tokens parsed and none added, as in transformers and llama-server. The template
itself writes its control tokens, BOS included. Text in a message that reads like a control token is not one: `prompt`
returns the spans of such text. `render` returns the text alone.
"""

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckdist.errors import ModelFileError, RequestError, one_line
from ckdist.tokens.control_text import ControlText, RenderedChat, new_mark
from ckdist.tokens.harmony import adapted, described, is_harmony
from ckdist.tokens.tool_format import HERMES, ToolFormat, find_tool_format
from ckdist.tokens.traits import Message, Traits, adapt, find_traits, joined_text

if TYPE_CHECKING:  # only rendering a chat loads jinja2
    from jinja2 import Template

    from ckdist.tokens.sandbox import ChatEnvironment
    from ckdist.tokens.tokenizer import Tokenizer

MAX_TEMPLATE = 256 << 10  # characters
MAX_OUTPUT = 16 << 20  # characters
THOUGHTS = (  # marks around reasoning, as models write it
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<thinking>", "</thinking>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
END = "ckdistFinalMessageEndsHere"  # appended to a continued message, to find its end in the prompt

CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# Used if the template has no place for tools.
TOOLS_TEXT = """You can call these functions, each given as JSON:
{tools}
To call one, write a JSON object with its name and its arguments between tags:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>
Call a function only if it helps with what the user asks."""

log = logging.getLogger(__name__)


class ChatTemplate:
    """The templates of one model by name: `default`, and in some models `tool_use` for requests with tools.

    Templates are compiled at first use.

    Args:
        special_tokens: Texts that templates call bos_token, eos_token and so on.
    """

    def __init__(self, templates: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None):
        self.sources = {"default": templates} if isinstance(templates, str) else dict(templates)
        self.special_tokens = {"bos_token": "", "eos_token": "", **(special_tokens or {})}
        for name, source in self.sources.items():
            if len(source) > MAX_TEMPLATE:
                raise ModelFileError(
                    f"chat template {name!r} has {len(source)} characters; at most {MAX_TEMPLATE} are allowed"
                )
        self._compiled: dict[str, Template] = {}
        self._traits: dict[str, Traits] = {}
        self._tool_formats: dict[str, ToolFormat] = {}
        self._refused: dict[str, str] = {}  # name -> why the template is not used

    def render(self, messages: Sequence[Mapping[str, object]], **options: Any) -> str:
        """Returns the text of `prompt`."""
        return self.prompt(None, messages, **options).text

    def prompt(
        self,
        control: ControlText | None,
        /,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        template: str | None = None,
        continue_final_message: bool | None = None,
        **variables: object,
    ) -> RenderedChat:
        """Renders the prompt for `messages`, maps with a `role` and a `content` of text or text parts (see `traits`).

        A last message of the assistant is continued: the prompt ends with its text.

        Args:
            control: Control tokens that are plain text in messages, tools and variables.
            template: The name of a template. By default, tools choose `tool_use` if it exists.
            continue_final_message: True demands a message to continue, False forbids it. None: as
                `add_generation_prompt`.
            variables: Variables of the template, passed unchanged (enable_thinking and the like).

        Raises RequestError if the template refuses the messages or cannot render them.
        """
        name = template or self.name_for(bool(tools))
        if name not in self.sources:
            raise RequestError(
                f"the model has no chat template {name!r}; it has {', '.join(sorted(self.sources)) or 'none'}"
            )
        messages = [_checked(message, index) for index, message in enumerate(messages)]
        by_assistant = bool(messages) and messages[-1]["role"] == "assistant"
        if continue_final_message and not by_assistant:
            raise RequestError("continue_final_message needs a last message of the assistant", "continue_final_message")
        continues = add_generation_prompt if continue_final_message is None else continue_final_message
        if tools and not self.tool_format(name).in_prompt:
            messages, tools = _with_tools_text(messages, tools), None
        messages = adapt(messages, self.traits(name))
        tools = list(tools) if tools else None
        if is_harmony(self.sources[name]):
            messages, tools = adapted(messages), described(tools) if tools else None
        continues = continues and by_assistant and not messages[-1].get("tool_calls")

        def rendered(messages: list[Any], tools: list[Any] | None, variables: dict[str, Any]) -> str:
            """The prompt, with the marks in its inputs."""
            if continues:
                return self._continued(name, messages, tools, variables)
            return self.written(name, messages, add_generation_prompt, tools, variables)

        if control is None:
            return RenderedChat(rendered(messages, tools, variables))
        return self._with_literal_text(control, name, rendered, (messages, tools, variables))

    def traits(self, name: str = "default") -> Traits:
        """The forms of messages that template `name` accepts."""
        if name not in self._traits:
            self._traits[name] = find_traits(functools.partial(self._tried, name), self.sources[name])
        return self._traits[name]

    def name_for(self, with_tools: bool) -> str:
        """Name of the template for a chat with or without tools."""
        return "tool_use" if with_tools and "tool_use" in self.sources else "default"

    def tool_format(self, name: str = "default") -> ToolFormat:
        """The format of tool calls in template `name`."""
        if name not in self._tool_formats:
            self._tool_formats[name] = find_tool_format(functools.partial(self._tried, name))
        return self._tool_formats[name]

    def _tried(
        self, name: str, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool = True
    ) -> str | None:
        """The prompt, or None if the template refuses."""
        try:
            return self.written(name, messages, add_generation_prompt, tools, {})
        except RequestError:
            return None

    def adopt(self, name: str, traits: Traits | None, tool_format: ToolFormat = HERMES) -> None:
        """Sets the traits and the format of calls that another process has found.

        Args:
            traits: None if the template exceeded the limits of that process. It is then not used.
        """
        self._tool_formats[name] = tool_format
        if traits is None:
            self._refused[name] = "the model's chat template takes too much time or memory; use /v1/completions"
            self._traits[name] = Traits()
        else:
            self._traits[name] = traits
            self._compile(name)

    def _with_literal_text(
        self,
        control: ControlText,
        name: str,
        rendered: Callable[[list[Any], list[Any] | None, dict[str, Any]], str],
        given: tuple[list[Any], list[Any] | None, dict[str, Any]],
    ) -> RenderedChat:
        """Renders the prompt and finds the spans of text from `given` that read like control tokens.

        Templates remove the marks around the assistant's reasoning from its text, so these marks stay as they are.
        """
        messages, tools, variables = given
        source = self.sources[name]
        own = frozenset(mark for marks in THOUGHTS for mark in marks if mark in source)
        kept = [own if message["role"] == "assistant" else () for message in messages]
        pairs = list(zip(messages, kept, strict=True))
        if not (any(control.needs_mark(*pair) for pair in pairs) or control.needs_mark([tools, variables])):
            return RenderedChat(rendered(*given))
        mark = new_mark(given, (source, *self.special_tokens.values()))
        marked = [control.marked(message, mark, own) for message, own in pairs]
        options = {key: control.marked(value, mark) for key, value in variables.items()}
        return control.without_marks(rendered(marked, control.marked(tools, mark), options), mark)

    def _continued(self, name: str, messages: list[Any], tools: list[Any] | None, variables: dict[str, Any]) -> str:
        """The prompt up to the end of the last message's own text."""
        last = messages[-1]
        text = joined_text(last["content"])
        if isinstance(last["content"], str):
            marked = text + END
        else:
            *before, part = last["content"] or [{"type": "text", "text": ""}]
            marked = [*before, {**part, "text": part["text"] + END}]
        prompt = self.written(name, [*messages[:-1], {**last, "content": marked}], False, tools, variables)
        end = prompt.rfind(END)
        if end >= 0:
            return prompt[:end]
        # The template omits a last message of the assistant.
        return self.written(name, messages[:-1], True, tools, variables) + text

    def written(
        self,
        name: str,
        messages: list[Any],
        add_generation_prompt: bool,
        tools: list[Any] | None,
        variables: dict[str, Any],
    ) -> str:
        """Writes the prompt of adapted messages by template `name`. Raises RequestError like `prompt`."""
        from jinja2.exceptions import TemplateError

        context = {**self.special_tokens, **variables, "messages": messages, "tools": tools}
        context |= {"documents": variables.get("documents"), "add_generation_prompt": add_generation_prompt}
        parts, size = [], 0
        try:
            for part in self._compile(name).generate(context):
                size += len(part)
                if size > MAX_OUTPUT:
                    raise RequestError(
                        f"the chat template writes more than {MAX_OUTPUT} characters; send shorter messages", "messages"
                    )
                parts.append(part)
        except RequestError:
            raise
        except TemplateError as error:
            raise RequestError(f"the chat template refuses the messages: {one_line(error)}", "messages") from None
        except Exception as error:  # a template can raise any error of Python's types and jinja2's filters
            raise RequestError(f"the chat template fails on the messages: {one_line(error)}", "messages") from None
        return "".join(parts)

    @functools.cached_property
    def _environment(self) -> "ChatEnvironment":
        from ckdist.tokens.sandbox import ChatEnvironment

        return ChatEnvironment()

    def _compile(self, name: str) -> "Template":
        if name in self._refused:
            raise RequestError(self._refused[name], "messages")
        if name not in self._compiled:
            try:
                self._compiled[name] = self._environment.from_string(self.sources[name])
            except Exception as error:
                self._refused[name] = f"the model's chat template is broken: {one_line(error)}; use /v1/completions"
                raise RequestError(self._refused[name], "messages") from None
        return self._compiled[name]


def with_template(tokenizer: "Tokenizer") -> "Tokenizer":
    """Returns `tokenizer` with a chat template, which is chatml if the model has none, as in llama-server."""
    if tokenizer.chat_template is not None:
        return tokenizer
    known = any(tokenizer.token_bytes(token) == b"<|im_start|>" for token in tokenizer.special_ids)
    log.warning(
        "the model has no chat template; chats are written as chatml%s",
        "" if known else ", whose control tokens it does not know",
    )
    bos = tokenizer.token_text(tokenizer.prefix[0]) if tokenizer.prefix else ""
    return replace(tokenizer, templates={"default": CHATML}, special_texts={"bos_token": bos})


def _with_tools_text(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
    """Adds the tools' descriptions to the system message."""
    shown = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = TOOLS_TEXT.format(tools=shown)
    if messages and messages[0]["role"] in ("system", "developer"):
        first = joined_text(messages[0]["content"])
        return [{**messages[0], "content": f"{first}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _checked(message: Mapping[str, object], index: int) -> dict[str, object]:
    """Returns `message` with the current names of roles. Raises RequestError if its form is wrong."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] has no role; give each message a role and a content", "messages")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise RequestError(
                    f"messages[{index}] has a content part of type {kind!r}; this model reads only 'text'", "messages"
                )
        content = list(content)
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"messages[{index}].content is of type {type(content).__name__}; give a string or text parts", "messages"
        )
    role = "tool" if message["role"] == "function" else message["role"]
    return {**message, "role": role, "content": content}
