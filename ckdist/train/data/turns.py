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
OTHER_THOUGHTS = (
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
HEADER = 12  # characters before an answer that must be those of the prompt


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


class _TurnWriter:
    """Finds the answers in the text of one template."""

    def __init__(self, render: Callable[..., str], source: str, tokenizer: Tokenizer) -> None:
        self.render = render
        self.marks = [marks for marks in (*THOUGHTS, *OTHER_THOUGHTS) if marks[0] in source or marks[1] in source]
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
        """Whether the template writes the thoughts of a last answer from its field."""
        probe = secrets.token_hex(8)
        answer = {"role": "assistant", "content": ".", **dict.fromkeys(THOUGHT_FIELDS, probe)}
        try:
            return probe in self.render([QUESTION, answer], add_generation_prompt=False)
        except RequestError:
            return False

    def turn(self, messages: Sequence[Any], index: int) -> Turn:
        """The turn of the answer messages[index]."""
        name = f"messages[{index}]"
        prompt = self.render(messages[:index], add_generation_prompt=True)
        whole = self.render(messages[: index + 1], add_generation_prompt=False)
        thought, content = self._parts(messages[index])
        notes: list[str] = []
        is_prefix = whole.startswith(prompt)
        answer = whole[len(prompt) :] if is_prefix else self._rewritten(prompt, whole, messages, index, notes)
        if thought and thought not in answer:
            notes.append(NO_THOUGHTS)
        self._check(answer, content, messages[index], name)
        answer, end = self._ended(messages, index, whole, answer, notes)
        learned = [(0, end)]
        if self.has_generation and is_prefix:
            learned = self._generated(messages[: index + 1], len(prompt), end) or learned
            if answer[learned[-1][1] : end].strip() in self.ends:  # a server generates the end token, too
                learned[-1] = (learned[-1][0], end)
        return Turn(prompt, answer, learned, notes)

    def _parts(self, message: dict[str, Any]) -> tuple[str, str]:
        """The thoughts and the words of an answer, without space around them. Thoughts may be marked in its content."""
        content = joined_text(message["content"]).strip()
        thought = message.get("reasoning_content") or ""
        for begin, end in self.marks or THOUGHTS[:1]:
            if not thought and end in content and content.startswith(begin):
                thought, _, content = content.removeprefix(begin).partition(end)
        return thought.strip(), content.strip()

    def _rewritten(self, prompt: str, whole: str, messages: Sequence[Any], index: int, notes: list[str]) -> str:
        """The answer if the prompt does not begin the whole text."""
        common = _common(prompt, whole)
        while prompt[common - 1 : common] in ("<", "["):  # two marks may begin with the same character
            common -= 1
        opening, rest = prompt[common:], whole[common:]
        for begin, end in self.marks:
            if prompt.rstrip().endswith(begin.rstrip()):  # the prompt opens thoughts, which the whole text has or drops
                written = rest.lstrip().removeprefix(begin)
                if end in written:
                    return written.lstrip() if prompt[-1].isspace() else written
                thought = self._parts(messages[index])[0]
                if not thought:
                    notes.append(EMPTY_THOUGHTS)
                return f"{thought}\n{end}\n\n{written.lstrip()}"
            if prompt.rstrip().endswith(end) and (begin in opening or end in opening):  # the prompt skips thoughts
                return rest.partition(end)[2].lstrip() if end in rest else rest
        if not opening.strip():
            return rest
        return self._aligned(prompt, whole, messages, index)

    def _aligned(self, prompt: str, whole: str, messages: Sequence[Any], index: int) -> str:
        """The answer if earlier messages are written differently before it. Its header shows where it begins."""
        header = prompt.removeprefix(self.render(messages[:index], add_generation_prompt=False))
        if header and header != prompt and (at := whole.rfind(header)) >= 0:
            return whole[at + len(header) :]
        other = {**messages[index], "content": f"\n{secrets.token_hex(8)}"}
        changed = self.render([*messages[:index], other], add_generation_prompt=False)
        before = whole[: _common(whole, changed)].rstrip()
        shown = prompt.rstrip()
        if before and before[-HEADER:] == shown[-HEADER:]:
            return whole[len(before) + len(prompt) - len(shown) :]
        raise RequestError(
            f"its template ends a prompt with {prompt[-HEADER:]!r}, and does not write this before "
            f"messages[{index}], so the assistant's words cannot be found"
        )

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
