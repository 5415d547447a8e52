"""Random schemas followed by a model that draws at random: every answer that was not cut parses and validates."""

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from ckdist.engine.engine import Engine
from ckdist.engine.grammars import Grammars
from ckdist.engine.load_model import BUNDLED
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.tokens.grammar import check_grammar, json_schema_grammar
from ckdist.tokens.tokenizer_source import tokenizer_of
from tests.support.paged_executable import PagedExecutable

KEYS = ["a", "b c", "é", "id", 'x"y', "a long name", "n"]
CONSTANTS = [1, "é", 'a"b', None, True, {"a": [1, 2]}, "\\n\n", -1.5, "</tool_call>", "☃", [1, [2]]]
PATTERNS = ["^[A-Z]{3}-\\d{2,4}$", "^(a|b|cd)+$", '^[^"\\\\]{1,5}$', "^[à-ÿ☃]{1,3}$", "^x?y*z$"]
FORMATS = ["date", "uuid", "ipv4", "time", "date-time"]
LINKED = {
    "type": "object",
    "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 9}, "next": {"$ref": "#/$defs/r"}},
    "required": ["v"],
    "additionalProperties": False,
}


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """One that some value satisfies."""
    deep = ["list", "tuple", "object", "object", "anyOf", "$ref"] if depth < 3 else []
    kind = rng.choice(["string", "integer", "number", "boolean", "null", "enum", "pattern", "format", *deep])
    low, inner = rng.randrange(-200, 200), lambda: schema(rng, depth + 1)
    if kind == "string":
        return {"type": kind, "minLength": abs(low) // 40, "maxLength": abs(low) // 40 + rng.randrange(9)}
    if kind == "integer":
        return {"type": kind, "minimum": low, "maximum": low + rng.randrange(5, 500), "multipleOf": rng.choice([1, 5])}
    if kind == "number":
        return {"type": kind, "minimum": low / 8, "maximum": low / 8 + rng.randrange(1, 50)}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        return {"enum": rng.sample(CONSTANTS, rng.randrange(1, 5))}
    if kind in ("pattern", "format"):
        return {"type": "string", kind: rng.choice(PATTERNS if kind == "pattern" else FORMATS)}
    if kind == "list":
        least = rng.randrange(3)
        return {"type": "array", "items": inner(), "minItems": least, "maxItems": least + rng.randrange(4)}
    if kind == "tuple":
        first = [inner() for _ in range(rng.randrange(1, 4))]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}
    if kind == "object":
        keys = rng.sample(KEYS, rng.randrange(1, 5))
        fields = {key: inner() for key in keys}
        required = [key for key in keys if rng.random() < 0.7]
        return {"type": kind, "properties": fields, "required": required, "additionalProperties": False}
    return {"anyOf": [inner() for _ in range(rng.randrange(1, 4))]} if kind == "anyOf" else {"$ref": "#/$defs/r"}


def params(rng: random.Random, seed: int, grammar: str) -> SamplingParams:
    """Ways to draw by turns."""
    return SamplingParams(
        max_tokens=400, seed=seed, grammar=grammar, logprobs=rng.choice([None, None, 1]),
        temperature=rng.choice([0.0, 1.0, 1.5]), min_tokens=rng.choice([0, 0, 3]), top_k=rng.choice([0, 20]),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
def test_answers_validate(seed):
    rng, tokenizer = random.Random(seed), tokenizer_of(BUNDLED)
    vocab, grammars = tokenizer.vocab_size, Grammars(tokenizer, tokenizer.vocab_size)
    executable = PagedExecutable(vocab_size=vocab, max_sequences=16, max_tokens=64, num_blocks=6000)
    engine = Engine(executable, Sampler(vocab), tokenizer.eos_token_ids, grammars=grammars)
    schemas = [{**schema(rng), "$defs": {"r": LINKED}} for _ in range(120)]
    tokens: dict[int, list[int]] = {number: [] for number in range(len(schemas))}
    reasons: dict[int, str] = {}

    def step() -> None:
        for output in engine.step():
            tokens[output.id] += output.tokens
            assert output.error is None, (schemas[output.id], output.error)
            if output.finish_reason is not None:
                reasons[output.id] = output.finish_reason

    for number, given in enumerate(schemas):
        grammar = json_schema_grammar(given)
        check_grammar(grammar)
        while not grammars.has_room(grammar):
            step()
        engine.add(number, [5 + number % 7] * 9, params(rng, number, grammar))
    while engine.has_work:
        step()
    checks = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for number, reason in reasons.items():
        if reason == "stop":
            answer = json.loads(tokenizer.decode(tokens[number]))
            jsonschema.validate(answer, schemas[number], format_checker=checks)
    assert sum(reason == "stop" for reason in reasons.values()) > 100


@pytest.mark.parametrize(
    "pattern, taken, refused",
    [
        (r'^[^"\\]+$', ["a\\nb", "é"], ['a\\"', "a\\\\"]),
        (r'^[^"]+$', ["a\\\\"], ['a\\"']),
        (r"^\[\^[^\\]$", ["[^\\t"], ["[^\\\\"]),
        ("^[^-a]$", ["b", "\\n"], ["-", "a"]),
    ],
)
def test_classes_hold_for_escaped_characters_too(pattern, taken, refused):
    schema = {"type": "object", "properties": {"pattern": {"type": "string", "pattern": pattern}}}
    grammar = json_schema_grammar({**schema, "required": ["pattern"], "additionalProperties": False})
    for text in taken + refused:
        matcher = LLMatcher(LLTokenizer("byte", slices=[]), grammar, log_level=0)
        taken_whole = matcher.consume_tokens(list(f'{{"pattern": "{text}"}}'.encode()))
        assert (taken_whole and matcher.is_accepting()) == (text in taken), text
