"""Divides a chat into turns: for each answer, the prompt that a server renders before it, and the text to learn.

A template may write an answer differently once it is history: Qwen3's drops its thoughts, DeepSeek-R1's generation
prompt opens them. So a turn compares the prompt of messages[:i] with the chat up to messages[i].
"""

import functools
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckdist.errors import RequestError
from ckdist.tokens.chat_template import THOUGHTS
from ckdist.tokens.sandbox import GENERATION_BEGIN, GENERATION_END
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.tokens.traits import joined_text

GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
MARKS = (  # around thoughts
    *THOUGHTS,
    ("<think:opensource>", "</think:opensource>"),
    ("<|channel>thought\n", "<channel|>"),
    ("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
)
# Findings of a turn that a user wants to know, as the report names them.
NO_THOUGHTS = "answers without the record's thoughts, which the template does not write"
EMPTY_THOUGHTS = "answers with empty thoughts, which the template opens"
ADDED_END = "answers whose end token the template does not write: it was added"
Span = tuple[int, int]
QUESTION = {"role": "user", "content": "."}
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
SHOWN = 12  # last characters of a prompt that a message shows
OPEN_TAG = re.compile(r"[<\[][^\s<>\[\]]*$")


@dataclass(frozen=True)
class Turn:
    """One answer.

    Attributes:
        prompt: The text that a server renders before it.
        answer: The text after it: the model's words, their end, and the template's text up to the next message.
        learned: Spans of `answer` with a loss. They end with the token that ends the turn.
        notes: Findings for the report.
    """

    prompt: str
    answer: str
    learned: list[Span]
    notes: list[str]


def turns_of(messages: Sequence[Any], tools: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> list[Turn]:
    """Returns the turns of a chat that `records` has checked.

    Raises:
        RequestError: The template refuses the chat, or does not write an answer, or a text has a control token.
    """
    assert tokenizer.chat_template is not None, "a tokenizer that renders chats has a template"
    template, options = tokenizer.chat_template, {"tools": tools, "continue_final_message": False}
    text, literal = template.prompt(tokenizer.control_text, messages, add_generation_prompt=False, **options)
    if literal:
        token = text[slice(*literal[0])]
        raise RequestError(f"its text has the control token {token!r}, which a server reads as plain text; change it")
    render = functools.partial(template.render, **options)
    source = template.sources[template.name_for(bool(tools))]
    writer = _TurnWriter(render, source, tokenizer)
    messages = [writer.normalised(message) for message in messages]
    return [writer.turn(messages, i) for i, message in enumerate(messages) if message["role"] == "assistant"]


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """The token after a text, or None.

    If several tokens end something, the first in the vocabulary ends texts; the others end turns.
    """
    return min(tokenizer.eos_token_ids, default=None)


def _common(first: str, second: str) -> int:
    """Characters that both texts begin with."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _common_end(first: str, second: str) -> str:
    """The text that both end with."""
    return first[len(first) - _common(first[::-1], second[::-1]) :]


class _TurnWriter:
    """Finds the answers in the text of one template."""

    def __init__(self, render: Callable[..., str], source: str, tokenizer: Tokenizer) -> None:
        self.render = render
        self.has_generation = GENERATION.search(source) is not None
        self.ends = [text for i in sorted(tokenizer.eos_token_ids) if (text := tokenizer.token_text(i))]
        ending = end_of_text(tokenizer)
        written = tokenizer.special_texts.get("eos_token")
        self.ending = written if written in self.ends else None if ending is None else tokenizer.token_text(ending)

    def normalised(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as a server's client sends it: no content next to calls, and thoughts in a field of their own if
        the template writes this field.
        """
        if message["role"] != "assistant":
            return message
        thought, content = self._parts(message)
        if thought and not message.get("reasoning_content") and self._writes_thoughts:
            message = {**message, **dict.fromkeys(THOUGHT_FIELDS, thought), "content": content}
        return {**message, "content": None} if message.get("tool_calls") and not message["content"] else message

    @functools.cached_property
    def _writes_thoughts(self) -> bool:
        """True if the template writes the thoughts of a last answer from its field."""
        probe = secrets.token_hex(8)
        answer = {"role": "assistant", "content": ".", **dict.fromkeys(THOUGHT_FIELDS, probe)}
        try:
            return probe in self.render([QUESTION, answer], add_generation_prompt=False)
        except RequestError:
            return False

    def turn(self, messages: Sequence[Any], index: int) -> Turn:
        """The turn of the answer messages[index]."""
        name, history, message = f"messages[{index}]", messages[:index], messages[index]
        prompt = self.render(history, add_generation_prompt=True)
        thought, content = self._parts(message)
        if thought and any(prompt.rstrip().endswith(end) for _, end in MARKS):  # the prompt skips thoughts
            message = {**message, "content": None if message.get("tool_calls") and not content else content}
        whole = self._written([*history, message])
        is_prefix = whole.startswith(prompt)
        answer = whole[len(prompt) :] if is_prefix else self._rewritten(prompt, whole, history, message, name)
        notes: list[str] = []
        answer = self._with_thoughts(prompt, answer, thought, notes)
        if thought and thought not in answer:
            notes.append(NO_THOUGHTS)
        self._check(answer, content, message, name)
        answer, end = self._ended([*history, message, *messages[index + 1 :]], index, whole, answer, notes)
        learned = [(0, end)]
        if self.has_generation and is_prefix:
            learned = self._generated([*history, message], len(prompt), end) or learned
            if answer[learned[-1][1] : end].strip() in self.ends:  # a server generates the end token, too
                learned[-1] = (learned[-1][0], end)
        return Turn(prompt, answer, learned, notes)

    def _written(self, messages: Sequence[Any]) -> str:
        """A chat that ends with an answer, without the next prompt that some templates always write after it."""
        whole = self.render(messages, add_generation_prompt=False)
        if self._always_prompts:
            last = max((at + len(end) for end in self.ends if (at := whole.rfind(end)) >= 0), default=len(whole))
            if self.render([QUESTION], add_generation_prompt=False).endswith(whole[last:].lstrip()):
                whole = whole[:last]
        return whole

    @functools.cached_property
    def _always_prompts(self) -> bool:
        """True if the template ignores add_generation_prompt."""
        try:
            return len({self.render([QUESTION], add_generation_prompt=flag) for flag in (False, True)}) == 1
        except RequestError:
            return False

    def _parts(self, message: dict[str, Any]) -> tuple[str, str]:
        """The thoughts and the words of an answer, without space around them. Thoughts may be marked in its content."""
        content = joined_text(message["content"]).strip()
        thought = message.get("reasoning_content") or ""
        for begin, end in MARKS:
            if not thought and end in content and content.startswith(begin):
                thought, _, content = content.removeprefix(begin).partition(end)
        return thought.strip(), content.strip()

    def _rewritten(self, prompt: str, whole: str, history: Sequence[Any], message: dict[str, Any], name: str) -> str:
        """The answer if the prompt does not begin the whole text: both are compared after the last message before it.

        Raises RequestError if the end of the prompt is not in the whole text.
        """
        shown, written = self._tails(prompt, whole, history, message)
        if written.startswith(shown):
            return written[len(shown) :]
        common = _common(shown, written)
        if tag := OPEN_TAG.search(shown, 0, common):  # two marks may begin with the same characters
            common = tag.start()
        opening, rest = shown[common:], written[common:]
        for begin, end in MARKS:
            if shown.rstrip().endswith(begin.rstrip()):  # the prompt opens thoughts
                rest = rest.lstrip().removeprefix(begin)
                return rest.lstrip() if shown[-1].isspace() or end not in rest else rest
            if shown.rstrip().endswith(end) and (begin in opening or end in opening):  # the prompt skips thoughts
                return rest.partition(end)[2].lstrip() if end in rest else rest
        if not opening.strip():
            return rest
        header = prompt.removeprefix(self.render(history, add_generation_prompt=False))
        if header and (at := written.find(header)) >= 0:
            return written[at + len(header) :]
        mark = secrets.token_hex(8)
        plain = self._written([*history, {"role": "assistant", "content": mark}])
        if opening == header and shown[:common] + mark in plain:  # only a prompt has the header
            return rest
        raise RequestError(
            f"its template ends a prompt with {prompt[-SHOWN:]!r}, and does not write this before {name}, so the "
            f"assistant's words cannot be found"
        )

    def _tails(self, prompt: str, whole: str, history: Sequence[Any], message: dict[str, Any]) -> tuple[str, str]:
        """The parts of both texts after the last message of `history`: they do not change with its content."""
        text = joined_text(history[-1]["content"]).strip()
        other = {**history[-1], "content": secrets.token_hex(8) + ("y" if text.endswith("x") else "x")}
        changed = [*history[:-1], other]
        try:
            return (
                _common_end(prompt, self.render(changed, add_generation_prompt=True)),
                _common_end(whole, self._written([*changed, message])),
            )
        except RequestError:
            return prompt, whole

    def _with_thoughts(self, prompt: str, answer: str, thought: str, notes: list[str]) -> str:
        """The answer with thoughts, if the prompt opens them and the template drops them."""
        for begin, end in MARKS:
            if prompt.rstrip().endswith(begin.rstrip()) and end not in answer:
                if not thought:
                    notes.append(EMPTY_THOUGHTS)
                return f"{thought}\n{end}\n\n{answer.lstrip()}"
        return answer

    def _check(self, answer: str, content: str, message: dict[str, Any], name: str) -> None:
        """Raises RequestError if the template has not written the words or the calls of an answer."""
        if not answer.strip():
            raise RequestError(f"its template writes nothing of {name}, the assistant's")
        if content not in answer:
            raise RequestError(f"its template does not write the content of {name} as it is")
        for call in message.get("tool_calls") or ():
            if call["function"]["name"] not in answer:
                raise RequestError(f"its template does not write the call of {call['function']['name']!r} in {name}")

    def _ended(self, messages: Sequence[Any], index: int, whole: str, answer: str, notes: list[str]) -> tuple[str, int]:
        """The answer with the token that ends it, and the end of this token.

        In some formats, the token that begins the next message ends the answer.
        """
        ends = [at + len(text) for text in self.ends if (at := answer.find(text)) >= 0]
        if ends:
            lost = answer[min(ends) :].strip()
            for text in self.ends:
                lost = lost.removeprefix(text).strip()
            if lost:
                raise RequestError(f"its template writes {lost[:40]!r} after the end of messages[{index}]")
            return answer, min(ends)
        following = messages[index + 1] if index + 1 < len(messages) else QUESTION
        try:
            after = self.render([*messages[: index + 1], following], add_generation_prompt=False)
        except RequestError:
            after = ""
        if after.startswith(whole) and (end := next((t for t in self.ends if after.startswith(t, len(whole))), None)):
            return answer + end, len(answer) + len(end)
        if self.ending is None:
            return answer, len(answer)
        notes.append(ADDED_END)
        return answer + self.ending, len(answer) + len(self.ending)

    def _generated(self, messages: Sequence[Any], begin: int, end: int) -> list[Span]:
        """Spans of the template's generation blocks, counted from `begin` and within `end`."""
        marks = [secrets.token_hex(16) for _ in range(2)]
        names = dict(zip((GENERATION_BEGIN, GENERATION_END), marks, strict=True))
        parts = re.split("|".join(marks), self.render(messages, add_generation_prompt=False, **names))
        spans, at = list[Span](), -begin
        for number, part in enumerate(parts):
            if number % 2 and at + len(part) > 0:
                spans.append((max(at, 0), min(at + len(part), end)))
            at += len(part)
        return [span for span in spans if span[0] < span[1]]
