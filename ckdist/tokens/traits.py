"""The forms of messages that a chat template accepts, found by rendering small chats, and messages in these forms.

Clients send OpenAI's form: any role, content as text or parts, arguments of tool calls as JSON text. Templates are
written for transformers' form, and each omits features that its model was not trained on. The rules are llama-server's:
content without a place in the template moves to one that exists, and is never dropped silently.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckdist.tokens.tool_format import HERMES

Message = dict[str, Any]

USER, ASSISTANT, SYSTEM, RESULT, KEY, VALUE, TOOL = (
    "userprobe",
    "assistantprobe",
    "systemprobe",
    "resultprobe",
    "keyprobe",
    "valueprobe",
    "toolprobe",
)
CALLED, ID = "calledprobe", "call00001"
TOOLS = [
    {
        "type": "function",
        "function": {"name": TOOL, "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
]


@dataclass(frozen=True)
class Traits:
    """The forms of messages that reach the prompt of a template."""

    system: bool = True
    developer: bool = False  # under that name
    text: bool = True  # content as text
    parts: bool = False  # content as a list of parts
    tool_calls: bool = True  # of the assistant
    tool_results: bool = True
    object_arguments: bool = False  # calls are written right with arguments as an object, not as JSON text
    null_content: bool = False  # content of a message with calls may be null
    empty_content: bool = True  # content of a message with calls may be empty text
    ids_name_tools: bool = False  # a call is written by its id alone, which holds the tool's name (Kimi's models)


def find_traits(render: Callable[[list[Message], list[Any] | None], str | None], source: str) -> Traits:
    """Finds the traits from rendered chats and the template's source.

    Args:
        render: (messages, tools) -> prompt, or None if the template refuses.
    """

    def prompt_of(messages: list[Message]) -> str:
        """The prompt without tools, else with them; empty if both are refused."""
        return render(messages, None) or render(messages, TOOLS) or ""  # some templates need tools

    text = USER in prompt_of([user(USER)])
    in_parts = prompt_of([user([{"type": "text", "text": USER}])])
    parts = USER in in_parts and "'type'" not in in_parts and '"type"' not in in_parts
    content = USER if text or not parts else [{"type": "text", "text": USER}]
    system_text = SYSTEM if text or not parts else [{"type": "text", "text": SYSTEM}]
    system = SYSTEM in prompt_of([{"role": "system", "content": system_text}, user(content)]) or not (text or parts)
    # A template that writes any role unchanged does not know this one.
    developer = "developer" in source and SYSTEM in prompt_of(
        [{"role": "developer", "content": system_text}, user(content)]
    )

    def with_tools(arguments: object, call_content: object, name: str = TOOL) -> str:
        """The prompt of a chat in which a tool is called."""
        calls = [{"id": ID, "type": "function", "function": {"name": name, "arguments": arguments}}]
        history = [
            user(content),
            {"role": "assistant", "content": call_content, "tool_calls": calls},
            {"role": "tool", "content": RESULT, "tool_call_id": ID, "name": TOOL},
            {"role": "assistant", "content": ASSISTANT},
            user(content),
        ]
        return render(history, TOOLS) or render(history, None) or ""

    by_id = [with_tools(arguments, "", CALLED) for arguments in ({KEY: VALUE}, f'{{"{KEY}": "{VALUE}"}}')]
    # Content next to calls, which some templates want null -> (accepts objects, accepts JSON text, shows results).
    taken = {}
    for empty in ("", None):
        as_object, as_text = with_tools({KEY: VALUE}, empty), with_tools(f'{{"{KEY}": "{VALUE}"}}', empty)
        results = RESULT in as_object or RESULT in as_text
        takes_object = (
            KEY in as_object and VALUE in as_object and f"'{KEY}'" not in as_object and f'\\"{KEY}' not in as_object
        )
        taken[empty] = (
            takes_object and "None" not in as_object,
            KEY in as_text and VALUE in as_text and "None" not in as_text,
            results,
        )
    return Traits(
        system=system,
        developer=developer,
        text=text or not parts,
        parts=parts,
        tool_calls=any(any(found[:2]) for found in taken.values()),
        tool_results=any(found[2] for found in taken.values()),
        object_arguments=taken[""][0] or (taken[None][0] and not taken[""][1]),
        null_content=any(taken[None][:2]),
        empty_content=any(taken[""][:2]) or not any(taken[None][:2]),
        ids_name_tools=any(ID in prompt and KEY in prompt and CALLED not in prompt for prompt in by_id),
    )


def user(content: object) -> Message:
    """A message of the user."""
    return {"role": "user", "content": content}


def adapt(messages: Sequence[Mapping[str, object]], traits: Traits) -> list[Message]:
    """Converts `messages` to the traits of a template.

    Each is a map with a `role` and a `content` of None, text or a list of text parts.
    """
    adapted = [
        _with_calls({**message, "content": _content(message.get("content"), traits)}, traits) for message in messages
    ]
    adapted = _with_named_ids(adapted) if traits.ids_name_tools else adapted
    adapted = _without_developer(adapted) if not traits.developer else adapted
    adapted = _without_results(adapted, traits) if not traits.tool_results else adapted
    return _without_system(adapted) if not traits.system else adapted


def joined_text(content: Any) -> str:
    """Content as one text. Parts are joined by newlines, as in llama-server and vLLM."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def _content(content: object, traits: Traits) -> object:
    if isinstance(content, list) and not traits.parts:
        return joined_text(content)
    if isinstance(content, str) and not traits.text:
        return [{"type": "text", "text": content}]
    return content


def _with_calls(message: Message, traits: Traits) -> Message:
    calls = message.get("tool_calls")
    if not message["content"]:
        is_null = message["content"] is None if traits.empty_content else True
        message["content"] = None if calls and traits.null_content and is_null else "" if traits.text else []
    if not calls:
        return message
    calls = [_with_arguments(call, traits.object_arguments or not traits.tool_calls) for call in calls]
    if traits.tool_calls:
        return {**message, "tool_calls": calls}
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    shown = HERMES.separator.join(map(_written, calls))
    return {**plain, "content": _content(_beside(joined_text(message["content"]), shown), traits)}


def _written(call: Mapping[str, Any]) -> str:
    """A call in the form that the prompt requests if the template knows no calls.

    A model continues in the form of its history.
    """
    function = call.get("function", call)
    if isinstance(function, Mapping):
        keys = HERMES.name_key, HERMES.arguments_key
        function = {key: function[key] for key in keys if key in function} or function
    return f"{HERMES.call_begin}{json.dumps(function, ensure_ascii=False)}{HERMES.call_end}"


def _with_named_ids(messages: list[Message]) -> list[Message]:
    """Renames ids of calls from other servers or clients to the form of Kimi's models: functions.NAME:NUMBER."""
    result, renamed, count = list[Message](), dict[str, str](), 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            begin, id = f"functions.{name}:", str(call.get("id"))
            renamed[id] = id if id.startswith(begin) else f"{begin}{count}"
            calls.append({**call, "id": renamed[id]})
            count += 1
        answered = renamed.get(str(message.get("tool_call_id")))
        more = {"tool_calls": calls} if calls else {"tool_call_id": answered} if answered else {}
        result.append({**message, **more})
    return result


def _with_arguments(call: Mapping[str, Any], as_object: bool) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if as_object and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return call  # text from a model need not be JSON
        return {**call, "function": {**function, "arguments": arguments}}
    if not as_object and isinstance(arguments, (dict, list)):
        return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}
    return call


def _without_developer(messages: list[Message]) -> list[Message]:
    """Makes developer messages system messages. Consecutive ones are merged: many templates read only the first."""
    result: list[Message] = []
    for given in messages:
        message = given
        if message["role"] == "developer":
            message = {**message, "role": "system"}
            if result and result[-1]["role"] == "system":
                result[-1] = {**result[-1], "content": _merged(result[-1]["content"], message["content"])}
                continue
        result.append(message)
    return result


def _without_results(messages: list[Message], traits: Traits) -> list[Message]:
    """Makes results of tools messages of the user."""
    result: list[Message] = []
    for given in messages:
        message = given
        if message["role"] == "tool":
            told = {name: message[name] for name in ("name", "tool_call_id") if message.get(name)} | {
                "content": joined_text(message["content"])
            }
            message = user(_content(json.dumps({"tool_response": told}, ensure_ascii=False), traits))
        _append_turn(result, message)
    return result


def _without_system(messages: list[Message]) -> list[Message]:
    """Moves system messages to the head of the user's next turn."""
    result: list[Message] = []
    pending: object = None
    for given in messages:
        message = given
        if message["role"] == "system":
            pending = message["content"] if pending is None else _merged(pending, message["content"])
            continue
        if pending is not None:
            if message["role"] == "user":
                message = {**message, "content": _merged(pending, message["content"])}
            else:
                _append_turn(result, user(pending))
            pending = None
        result.append(message)
    if pending is not None:
        _append_turn(result, user(pending))
    return result


def _append_turn(messages: list[Message], message: Message) -> None:
    """Appends a message, merging two turns of the user. Templates without system or tools often require alternating
    roles.
    """
    if message["role"] == "user" and messages and messages[-1]["role"] == "user":
        messages[-1] = {**messages[-1], "content": _merged(messages[-1]["content"], message["content"])}
    else:
        messages.append(message)


def _merged(first: Any, second: Any) -> str | list[Any]:
    if isinstance(first, list) or isinstance(second, list):
        return [*_as_parts(first), *_as_parts(second)]
    return _beside(first, second)


def _beside(first: str, second: str) -> str:
    return f"{first}\n{second}" if first else second


def _as_parts(content: object) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
