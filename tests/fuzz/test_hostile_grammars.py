"""Schemas, grammars and histories of strangers: each is prepared or refused within limits, and nothing else happens."""

import json
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckdist.errors import CkdistError
from ckdist.serve.requests.prepare import prepare
from ckdist.serve.requests.prepared import ModelFacts, Prepared
from ckdist.tokens.chat import with_template
from ckdist.tokens.folder import load_tokenizer
from tests.server.test_tools import TOOLS
from tests.support import tool_templates as templates
from tests.support.served import VOCAB, write_tokenizer

SLOW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

WORDS = st.sampled_from(
    [
        "type",
        "object",
        "string",
        "array",
        "integer",
        "properties",
        "required",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "#",
        "#/$defs/a",
        "$defs",
        "items",
        "minItems",
        "maxLength",
        "pattern",
        "format",
        "not",
        "additionalProperties",
        "uuid",
        "a{9}",
        "(",
        "x-guidance",
        "prefixItems",
        "minimum",
        "multipleOf",
        "",
        "é",
        "a",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=20,
)
TEXTS = st.text(st.sampled_from("ab[]{}()|*+?\\\"'/.:-^$<>~&%@=#,; \n09" + string.ascii_letters), max_size=60)
GBNF = st.builds(lambda rules: "root ::= " + "\nr ::= ".join(rules), st.lists(TEXTS, min_size=1, max_size=4))


@pytest.fixture(scope="module", params=["TAGGED_JSON", "TAGGED_ARGUMENTS", "LISTED_JSON", "NO_TOOLS"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return with_template(load_tokenizer(write_tokenizer(folder, getattr(templates, request.param))))


def prepared_or_refused(tokenizer, **fields):
    body = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 5, **fields}
    try:
        found = prepare("chat", json.dumps(body).encode(), tokenizer, ModelFacts("m", VOCAB, 1 << 16))
    except CkdistError as error:
        assert str(error) and "\n" not in str(error)
        return
    assert isinstance(found, Prepared) and Prepared.from_map(found.to_map()) == found


@SLOW
@given(schema=st.dictionaries(WORDS, VALUES, max_size=6), strict=st.booleans())
def test_any_schema(tokenizer, schema, strict):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
    prepared_or_refused(tokenizer, response_format=form)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
    prepared_or_refused(tokenizer, tools=[tool], tool_choice="required")


@SLOW
@given(text=TEXTS, grammar=GBNF, choices=st.lists(st.text(max_size=9), max_size=5))
def test_any_grammar(tokenizer, text, grammar, choices):
    prepared_or_refused(tokenizer, guided_regex=text)
    prepared_or_refused(tokenizer, grammar=grammar)
    prepared_or_refused(tokenizer, grammar="start: " + text)
    prepared_or_refused(tokenizer, guided_choice=choices)


CALL = st.fixed_dictionaries(
    {},
    optional={
        "id": VALUES,
        "type": VALUES,
        "function": VALUES | st.fixed_dictionaries({"name": VALUES, "arguments": VALUES}),
    },
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"])},
    optional={
        "content": st.none() | TEXTS,
        "tool_calls": st.lists(CALL, max_size=3),
        "reasoning": TEXTS,
        "name": TEXTS,
    },
)


@SLOW
@given(messages=st.lists(MESSAGE, max_size=5))
def test_any_history_of_calls(tokenizer, messages):
    prepared_or_refused(tokenizer, messages=messages)
    prepared_or_refused(tokenizer, messages=messages, tools=TOOLS)
