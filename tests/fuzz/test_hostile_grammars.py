"""Schemas, grammars and histories of strangers: each is prepared or refused within limits, and nothing else happens."""

import json
import string
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckdist.engine.engine import Engine
from ckdist.engine.grammars import Grammars
from ckdist.engine.load_model import BUNDLED
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import CkdistError
from ckdist.serve.requests import answer_form, structure
from ckdist.serve.requests.prepare import prepare
from ckdist.serve.text_records import ModelFacts, Prepared, read_answer
from ckdist.tokens.chat_template import with_template
from ckdist.tokens.tokenizer_folder import load_tokenizer
from ckdist.tokens.tokenizer_source import tokenizer_of
from ckdist.tokens.worker_frames import packed
from tests.server.test_tools import TOOLS
from tests.support import tool_templates as templates
from tests.support.hostile_grammars import REFUSED, TAKEN
from tests.support.paged_executable import PagedExecutable
from tests.support.served import VOCAB, serving, write_tokenizer

SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

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


def prepared_or_refused(tokenizer, kind="chat", **fields):
    """What the engine is to do, None where the request is refused in one line."""
    body = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 5, **fields}
    try:
        found = prepare(kind, json.dumps(body).encode(), tokenizer, ModelFacts("m", VOCAB, 1 << 16))
    except CkdistError as error:
        assert str(error) and "\n" not in str(error)
        return None
    assert isinstance(found, Prepared)
    assert read_answer(packed(found)) == found
    return found


@SLOW
@given(schema=st.dictionaries(WORDS, VALUES, max_size=6), strict=st.booleans())
def test_any_schema(tokenizer, schema, strict):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
    prepared_or_refused(tokenizer, response_format=form)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
    prepared_or_refused(tokenizer, tools=[tool], tool_choice="required")
    prepared_or_refused(tokenizer, tools=[tool])  # free, and where it is strict, by a grammar


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
ROLES = st.sampled_from(["user", "assistant", "tool", "system", "developer", "function", "robot", "", None, 5])
MESSAGE = st.fixed_dictionaries(
    {"role": ROLES},
    optional={
        "content": st.none() | TEXTS,
        "tool_calls": VALUES | st.lists(CALL, max_size=3),
        "tool_call_id": VALUES,
        "reasoning": TEXTS,
        "name": TEXTS,
    },
)
KINDS = ["text", "tool_use", "tool_result", "thinking", "image", "message", "function_call", "function_call_output"]
ARGUMENTS = st.sampled_from(["{", "null", '{"a": NaN}', '{"a":' * 300, '{"city": "\\ud800"}'])
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from([*KINDS, "reasoning", "x", None, 5])},
    optional={
        **dict.fromkeys(("id", "tool_use_id", "call_id", "name", "input", "output", "summary"), VALUES),
        **dict.fromkeys(("role", "content"), ROLES | TEXTS | st.lists(VALUES, max_size=2)),
        "text": TEXTS | VALUES,
        "arguments": ARGUMENTS | VALUES,
    },
)


@SLOW
@given(messages=st.lists(MESSAGE, max_size=5), blocks=st.lists(BLOCK, max_size=4))
def test_any_history_of_calls(tokenizer, messages, blocks):
    prepared_or_refused(tokenizer, messages=messages)
    prepared_or_refused(tokenizer, messages=messages, tools=TOOLS)
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": blocks}]
    prepared_or_refused(tokenizer, "messages", messages=said)
    prepared_or_refused(tokenizer, "response", input=blocks, max_output_tokens=5)


@pytest.mark.parametrize("count, taken", [(400, True), (5000, False)])
def test_a_huge_history_of_calls(tokenizer, count, taken):
    call = {"id": "call00001", "type": "function", "function": {"name": "get", "arguments": '{"city": "Rome"}'}}
    turn = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": "21"},
        {"role": "assistant", "content": "a"},
    ]
    found = prepared_or_refused(tokenizer, messages=turn * (count // 4), tools=TOOLS)
    assert (found is not None) == taken


@pytest.fixture(scope="module")
def http():
    with serving({"context_length": 1 << 16}, templates.TAGGED_JSON) as (_, process):
        yield process


def asked(http, fields) -> tuple[int, str]:
    body = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 5, **fields}
    answer = httpx.post(f"{http.url}/v1/chat/completions", json=body, timeout=30)
    return answer.status_code, answer.text


@pytest.mark.parametrize("name", TAKEN)
def test_a_hostile_grammar_is_refused_or_taken(http, name):
    status, text = asked(http, TAKEN[name])
    assert status in (200, 400), text[:300]


@pytest.mark.alone
def test_hostile_grammars_are_refused_and_others_are_answered_meanwhile(http):
    def seconds(fields, status: int) -> float:
        begin = time.monotonic()
        answer = asked(http, fields)
        assert answer[0] == status, (answer[1][:300], str(fields)[:300])
        return time.monotonic() - begin

    alone = sorted((seconds(fields, 400), name) for name, fields in REFUSED.items())
    assert alone[len(alone) // 2][0] < 0.5 and alone[-1][0] < 3
    with ThreadPoolExecutor(4) as threads:
        attacks = [threads.submit(seconds, REFUSED[name], 400) for _, name in alone[-4:]]
        beside = [seconds({}, 200) for _ in iter(lambda: all(attack.done() for attack in attacks), True)]
        assert [attack.result() for attack in attacks] and max(beside) < 2


def test_what_is_taken_costs_the_engine_little(tmp_path, monkeypatch):
    for module in (structure, answer_form):  # the server's checks, which take longer, are those of the tests above
        monkeypatch.setattr(module, "check_grammar", lambda *_: None)
    tokenizer = with_template(load_tokenizer(write_tokenizer(tmp_path, templates.TAGGED_JSON)))
    messages = {"messages": [{"role": "user", "content": "q"}]}
    bodies = [json.dumps({**messages, **fields}).encode() for fields in TAKEN.values()]
    facts = ModelFacts("m", VOCAB, 1 << 16)
    grammars = [prepare("chat", body, tokenizer, facts).sampling.grammar for body in bodies]
    bundled = tokenizer_of(BUNDLED)
    executable = PagedExecutable(vocab_size=bundled.vocab_size, max_sequences=64, max_tokens=64, num_blocks=2000)
    compiler = Grammars(bundled, bundled.vocab_size)
    engine = Engine(executable, Sampler(bundled.vocab_size), bundled.eos_token_ids, grammars=compiler)
    compiler.prepare()
    begin = time.process_time()
    for number, grammar in enumerate([None, *grammars]):
        given = SamplingParams(max_tokens=100, seed=number, grammar=grammar, ignore_eos=True)
        engine.add(number, [5] * 9, given)
    ends = {}
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason is not None:
                ends[output.id] = output.finish_reason, output.error or ""
    assert ends.pop(0) == ("length", "")
    assert all(reason != "error" or "make it simpler" in why for reason, why in ends.values())
    assert time.process_time() - begin < 0.6 * len(grammars)
