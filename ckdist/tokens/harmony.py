"""OpenAI's harmony format: its marks, and the needs of its templates.

An answer is a list of messages, each in a channel of the model:

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

Source: https://github.com/openai/harmony/blob/main/docs/format.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
ASSISTANT = f"{START}assistant"
FUNCTIONS = "functions."  # before a tool's name


def is_harmony(template: str) -> bool:
    """True if a chat template writes this format."""
    return f"{CHANNEL}final{MESSAGE}" in template and ASSISTANT in template


def begun(prompt: str) -> str:
    """The part of the answer that is in the prompt, after its author. Empty if a message is to begin."""
    return prompt.rpartition(ASSISTANT)[2]


def adapted(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages in the form of harmony's templates.

    A message with a call must not have both a text and a thought, so these become one thought.
    """
    refused = lambda m: all(m.get(part) for part in ("tool_calls", "content", "thinking"))
    return [_with_one_thought(message) if refused(message) else message for message in messages]


def described(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Tools with a description each, if only an empty one. Templates fail without it."""
    return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]


def _with_one_thought(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message["content"]
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    return {**message, "content": "", "thinking": f"{message['thinking']}\n\n{text}"}
