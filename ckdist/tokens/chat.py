"""Chat templates: the jinja2 programs in model files that write a list of messages as one prompt.

The text that comes out is encoded with special tokens parsed and without adding any, as transformers and llama-server
do: the template puts its control tokens, BOS included, itself. A control token's text in a message is no such token:
`prompt` says where such text stands. `render` gives the text alone.
"""

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckdist.errors import ModelFileError, RequestError
from ckdist.tokens.control_text import ControlText, RenderedChat, new_mark
from ckdist.tokens.harmony import adapted, described, is_harmony
from ckdist.tokens.tool_format import HERMES, ToolFormat, find_tool_format
from ckdist.tokens.traits import Message, Traits, adapt, find_traits, joined_text

if TYPE_CHECKING:  # who renders no chat loads no jinja2
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
END = "ckdistFinalMessageEndsHere"  # put behind a message that is continued, to find its end in the prompt

CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# Where the template has no place for tools.
TOOLS_TEXT = """You can call these functions, each given as JSON:
{tools}
To call one, write a JSON object with its name and its arguments between tags:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>
Call a function only if it helps with what the user asks."""

log = logging.getLogger(__name__)


class ChatTemplate:
    """One model's templates by name: `default`, and where the model has it `tool_use` for requests with tools.

    `special_tokens` are the texts that templates call bos_token, eos_token and so on. Compiled at first use.
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
        self._refused: dict[str, str] = {}  # by name, why a template is not used

    def render(self, messages: Sequence[Mapping[str, object]], **options: Any) -> str:
        """The text of `prompt`."""
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
        """The prompt for `messages`, each with a `role` and a `content` of text or of text parts, in OpenAI's form (see
        `traits`). `control`: control tokens that are text in what the messages, tools and variables say.

        `template` names one of several; without it, tools choose `tool_use` where there is one. `variables`
        (enable_thinking and the like) reach the template as they are. A last message of the assistant is continued: the
        prompt ends with its text. `continue_final_message` demands that, or forbids it where False; with
        `add_generation_prompt` False None forbids it too. Raises RequestError for messages that the template refuses or
        cannot render.
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
            """The text, with the marks of what it is made of."""
            if continues:
                return self._continued(name, messages, tools, variables)
            return self.written(name, messages, add_generation_prompt, tools, variables)

        if control is None:
            return RenderedChat(rendered(messages, tools, variables))
        return self._with_literal_text(control, name, rendered, (messages, tools, variables))

    def traits(self, name: str = "default") -> Traits:
        """What template `name` can take."""
        if name not in self._traits:

            def render(messages: list[Message], tools: list[dict[str, Any]] | None) -> str | None:
                """The prompt; None where the template refuses."""
                try:
                    return self.written(name, messages, True, tools, {})
                except RequestError:
                    return None

            self._traits[name] = find_traits(render, self.sources[name])
        return self._traits[name]

    def name_for(self, with_tools: bool) -> str:
        """Which template a chat with tools, or without, is rendered by."""
        return "tool_use" if with_tools and "tool_use" in self.sources else "default"

    def tool_format(self, name: str = "default") -> ToolFormat:
        """How calls are written, as template `name` shows it."""
        if name not in self._tool_formats:

            def render(messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool) -> str | None:
                """The prompt; None where the template refuses."""
                try:
                    return self.written(name, messages, add_generation_prompt, tools, {})
                except RequestError:
                    return None

            self._tool_formats[name] = find_tool_format(render)
        return self._tool_formats[name]

    def adopt(self, name: str, traits: Traits | None, tool_format: ToolFormat = HERMES) -> None:
        """`traits` and the format of calls as another process has found them; None where the template used up that
        process' limits: it is not used then.
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
        """The prompt, and where the text of `given` reads as a control token. A template takes the marks around the
        assistant's own reasoning out of its text: these stay.
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
        return (
            self.written(name, messages[:-1], True, tools, variables) + text
        )  # it leaves out what an assistant said last

    def written(
        self,
        name: str,
        messages: list[Any],
        add_generation_prompt: bool,
        tools: list[Any] | None,
        variables: dict[str, Any],
    ) -> str:
        """The prompt that template `name` writes of messages that are adapted to it. RequestError as `render`."""
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
            raise RequestError(f"the chat template refuses the messages: {_one_line(error)}", "messages") from None
        except Exception as error:  # a template can raise anything that Python's own types and jinja2's filters do
            raise RequestError(f"the chat template fails on the messages: {_one_line(error)}", "messages") from None
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
                self._refused[name] = f"the model's chat template is broken: {_one_line(error)}; use /v1/completions"
                raise RequestError(self._refused[name], "messages") from None
        return self._compiled[name]


def with_template(tokenizer: "Tokenizer") -> "Tokenizer":
    """`tokenizer` with a chat template: a model that has none gets chatml, as in llama-server."""
    if tokenizer.chat_template is not None:
        return tokenizer
    known = any(tokenizer.token_bytes(token) == b"<|im_start|>" for token in tokenizer.special_ids)
    log.warning(
        "the model has no chat template; chats are written as chatml%s",
        "" if known else ", whose control tokens it does not know",
    )
    bos = tokenizer.token_text(tokenizer.prefix[0]) if tokenizer.prefix else ""
    return replace(tokenizer, chat_template=ChatTemplate(CHATML, {"bos_token": bos}))


def _with_tools_text(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
    """`messages` with a system message that tells of the tools."""
    shown = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = TOOLS_TEXT.format(tools=shown)
    if messages and messages[0]["role"] in ("system", "developer"):
        first = joined_text(messages[0]["content"])
        return [{**messages[0], "content": f"{first}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _checked(message: Mapping[str, object], index: int) -> dict[str, object]:
    """`message` with the roles' present names. RequestError for another form than `render` takes."""
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


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
