"""OpenAI's harmony format: an answer is messages, each in a channel of the model's. Its marks, and what its templates
want.

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
    """Whether a chat template writes this format."""
    return f"{CHANNEL}final{MESSAGE}" in template and ASSISTANT in template


def begun(prompt: str) -> str:
    """What a prompt has of the answer, behind the word that says whose it is; empty where a message is to begin."""
    return prompt.rpartition(ASSISTANT)[2]


def adapted(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages as its templates take them: beside a call not both a text and a thought, which become one thought."""
    refused = lambda m: all(m.get(part) for part in ("tool_calls", "content", "thinking"))
    return [_with_one_thought(message) if refused(message) else message for message in messages]


def described(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Tools, each with a description, be it empty, without which its templates fail."""
    return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]


def _with_one_thought(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message["content"]
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    return {**message, "content": "", "thinking": f"{message['thinking']}\n\n{text}"}
