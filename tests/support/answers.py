"""Answers of a chat, read in parts that a seed decides, and random ones that follow a grammar."""

import functools
import random

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ckdist.serve.chat_message import parser_of
from ckdist.serve.parsers.form import AnswerForm
from ckdist.tokens.grammar_limits import limits

TYPES = {"get": {"city": "string", "n": "integer"}, "f": {}}


def read(form: AnswerForm, text: str, seed: int = 0):
    """Content, reasoning, and calls as name and arguments; the text comes in parts that the seed decides."""
    parser, choose, deltas, at = parser_of(form), random.Random(seed), [], 0
    while at < len(text):
        size = choose.randint(1, 5) if seed else len(text)
        deltas += parser.step(text[at : at + size])
        at += size
    deltas += parser.flush()
    calls: list = []
    for delta in deltas:
        if delta.name is not None:
            assert delta.call == len(calls)
            calls.append([delta.name, ""])
        if delta.call is not None:
            calls[delta.call][1] += delta.arguments
    return "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), calls


def always(form: AnswerForm, text: str):
    """The same, however the text is cut."""
    found = read(form, text)
    for seed in range(1, 40):
        assert read(form, text, seed) == found
    return found


SCHEMAS = {
    "get": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "n": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city", "n"],
        "additionalProperties": False,
    },
    "note": {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
            "deep": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]},
        },
        "required": ["tags", "deep"],
        "additionalProperties": False,
    },
}


LIKELY = frozenset(b'"<}]\n,')
PLAIN = frozenset(range(32, 127)) - {92}


@functools.cache
def bytes_alone() -> LLTokenizer:
    return LLTokenizer("byte", slices=[])


def follows(grammar: str, text: str) -> bool:
    """Whether the bytes of `text` are a whole answer by the grammar."""
    matcher = LLMatcher(bytes_alone(), grammar, log_level=0, limits=limits())
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def written(grammar: str, choose: random.Random) -> str | None:
    """A random text that follows a grammar; None where it has no end within 1000 bytes."""
    matcher, text = LLMatcher(bytes_alone(), grammar, log_level=0, limits=limits()), bytearray()
    for _ in range(1000):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(mask, count=256, bitorder="little").nonzero()[0].tolist()
        if matcher.is_accepting() and (not allowed or choose.random() < 0.3):
            return text.decode()
        chosen = [byte for byte in allowed if byte in LIKELY] if choose.random() < 0.5 else []
        text.append(choose.choice(chosen or [byte for byte in allowed if byte in PLAIN] or allowed))
        assert matcher.consume_token(text[-1])
    return None
