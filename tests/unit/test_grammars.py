"""Grammars inside the engine: what comes out follows them, whatever else is asked for and shares the batch."""

import json
import threading

import numpy as np
import pytest

from ckdist.engine import constraint as following
from ckdist.engine import grammars as compiling
from ckdist.engine.constraint import Constraint
from ckdist.engine.engine import Engine
from ckdist.engine.grammars import Grammars
from ckdist.engine.load_model import BUNDLED
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.side_thread import SideThread
from ckdist.errors import RequestError
from ckdist.tokens.grammar import (
    check_grammar,
    choice_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
    text_grammar,
)
from ckdist.tokens.tokenizer_source import tokenizer_of
from tests.support.paged_executable import PagedExecutable

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "kind": {"enum": ["first", "second"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
GRAMMAR = json_schema_grammar(SCHEMA)
FORMS = [{}, {"min_tokens": 3}, {"ignore_eos": True}, {"temperature": 0.0}, {"mirostat": 2}, {"top_p": 0.5, "top_k": 9}]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(BUNDLED)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    made = Grammars(tokenizer, tokenizer.vocab_size + 7)  # an embedding may have more rows
    made.prepare()
    return made


@pytest.fixture
def engine(tokenizer, grammars):
    def make(**options):
        vocab = tokenizer.vocab_size + 7
        executable = PagedExecutable(vocab_size=vocab, **options)
        return Engine(executable, Sampler(vocab), tokenizer.eos_token_ids, grammars=grammars)

    return make


def finish(engine) -> dict:
    results: dict = {}
    for _ in range(5000):
        if not engine.has_work:
            return results
        for output in engine.step():
            tokens, scores, _, _ = results.get(output.id, ([], [], None, None))
            tokens = tokens + output.tokens
            results[output.id] = tokens, scores + (output.logprobs or []), output.finish_reason, output.error
    raise AssertionError("the engine makes no progress")


def add(engine, id, grammar=GRAMMAR, **fields):
    engine.add(id, [5 + id % 3] * 9, SamplingParams(**{"max_tokens": 200, "seed": id, "grammar": grammar, **fields}))


def test_what_comes_out_follows_the_schema_also_when_preempted(engine, tokenizer):
    made = engine(num_blocks=7)
    for i in range(12):
        add(made, i, **FORMS[i % len(FORMS)])
    results = finish(made)
    assert made.scheduler.preemptions > 0
    for tokens, _, reason, _ in results.values():
        answer = json.loads(tokenizer.decode(tokens))
        assert reason == "stop" and set(answer) == {"name", "kind"} and answer["kind"] in ("first", "second")
    for i in range(12):
        alone = engine()
        add(alone, i, **FORMS[i % len(FORMS)])
        assert finish(alone)[i] == results[i]


def test_forced_tokens_go_in_as_one_chunk_and_have_scores_where_these_are_wanted(engine):
    plain, scored = engine(), engine()
    add(plain, 0)
    add(scored, 0, logprobs=2)
    (tokens, _, _, _), (same, scores, _, _) = finish(plain)[0], finish(scored)[0]
    assert tokens == same and len(scores) == len(tokens)
    assert len(scored.executable.batches) == len(tokens) > len(plain.executable.batches) + 4
    assert any(count > 1 and first > 8 for step in plain.executable.batches[1:] for count, first in step)


@pytest.mark.parametrize(
    "grammar, texts",
    [
        (choice_grammar(["yes", "no", 'may"be']), {"yes", "no", 'may"be'}),
        (choice_grammar([f"no. {i}" for i in range(4096)]), {f"no. {i}" for i in range(4096)}),
        (regex_grammar("a{3}|b"), {"aaa", "b"}),
        (text_grammar('root ::= "x" y\ny ::= "1" | "2"'), {"x1", "x2"}),
        (lark_grammar('start: "é" /[☃☄]/'), {"é☃", "é☄"}),
    ],
)
def test_other_forms(engine, tokenizer, grammar, texts):
    check_grammar(grammar)
    made = engine()
    for i in range(6):
        add(made, i, grammar)
    results = finish(made)
    assert {tokenizer.decode(tokens) for tokens, _, _, _ in results.values()} <= texts
    assert {reason for _, _, reason, _ in results.values()} == {"stop"}


def test_an_answer_that_is_cut_is_one_of_length_and_a_stop_token_ends_it(engine, tokenizer):
    made = engine()
    add(made, 0, regex_grammar("abcdefghijklmnop"), max_tokens=3)
    stop = tokenizer.encode("abcdefghijklmnop", add_special=False)[1]
    add(made, 1, regex_grammar("abcdefghijklmnop"), stop_token_ids=(stop,))
    results = finish(made)
    assert len(results[0][0]) == 3 and results[0][2] == "length"
    assert len(results[1][0]) == 1 and results[1][2] == "stop"


def test_a_grammar_that_is_wrong_or_becomes_too_complex_ends_its_own_request_alone(engine):
    made = engine()
    add(made, 0)
    add(made, 1, "start: nothing")
    add(made, 2, lark_grammar("start: A\nA: /.*a.{200}/ & ~/.*b.{200}/"))
    results = finish(made)
    assert results[0][2] == "stop" and results[0][3] is None
    assert (
        results[1][2] == results[2][2] == "error" and "grammar" in results[1][3] and "make it simpler" in results[2][3]
    )
    bare = Engine(PagedExecutable(), Sampler(50))
    with pytest.raises(RequestError, match="needs a tokenizer"):
        bare.add(0, [1], SamplingParams(grammar=GRAMMAR))


def test_a_grammar_that_takes_too_much_time_ends_its_own_request_alone(engine, monkeypatch):
    monkeypatch.setattr(following, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(following, "TOKEN_SECONDS", 0.0)
    made = engine()
    add(made, 0)
    add(made, 1, None, max_tokens=9)
    results = finish(made)
    assert results[0][2:] == ("error", following.TOO_SLOW) and results[1][2:] == ("length", None)


def test_how_much_is_kept(tokenizer, monkeypatch):
    made, texts = Grammars(tokenizer, tokenizer.vocab_size), [regex_grammar(f"{i}" * 40) for i in range(9)]
    monkeypatch.setattr(compiling, "MAX_KEPT_TEXT", 3 * len(texts[0]))
    found = [made.find(text) for text in texts]
    assert all(one.future.result(30) for one in found) and made.find(texts[8]) is found[8]
    assert made.find(texts[7]) is found[7] and made.find(texts[0]) is not found[0]


def test_grammars_that_take_much_time_are_forgotten_and_many_at_once_wait(engine, tokenizer, grammars, monkeypatch):
    made = engine()
    add(made, 0)
    first = grammars.find(GRAMMAR)
    assert finish(made)[0][2] == "stop" and grammars.find(GRAMMAR) is first
    first.seconds += compiling.MAX_KEPT_SECONDS
    add(made, 1)
    assert finish(made)[1][2] == "stop" and grammars.find(GRAMMAR) is not first
    monkeypatch.setattr(compiling, "MAX_COMPILING_SECONDS", -1.0)
    for _ in range(2):  # not remembered
        add(made, 2, choice_grammar(["no room"]))
        assert finish(made)[2][2:] == ("error", "too many complex grammars are in use; try again later")
    monkeypatch.undo()
    add(made, 2, choice_grammar(["no room"]))
    assert finish(made)[2][2] == "stop"


def test_a_thread_that_does_not_come_back_is_left_behind():
    thread, ended, done, left = SideThread("test", 0.02), threading.Event(), [], []
    batch = thread.begin([lambda: done.append(0), lambda: ended.wait(60), lambda: done.append(left[:])])
    thread.finish(batch, left.append)
    thread.finish(thread.begin([lambda: done.append(3)]), left.append)
    assert left == [1] and done == [0, [1], 3]
    ended.set()
    with pytest.raises(ZeroDivisionError):
        thread.finish(thread.begin([lambda: 1 / 0]), left.append)


def test_banned_tokens_are_not_allowed_unless_nothing_else_is(grammars, tokenizer):
    found = grammars.find(choice_grammar(["a", "b"]))
    found.future.result(30)
    a, b = (tokenizer.encode(text, add_special=False)[0] for text in "ab")
    constraint = Constraint(found, tokenizer.vocab_size)
    allowed = lambda: np.flatnonzero(np.unpackbits(constraint.allowed.view(np.uint8), bitorder="little")).tolist()
    constraint.fill(np.array([a], np.int32))
    assert allowed() == [b]
    constraint.fill(np.array([a, b], np.int32))
    assert allowed() == sorted([a, b])


@pytest.mark.parametrize("own", [{"$ref": "#/$defs/a"}, {"allOf": [{"$ref": "#/$defs/a"}]}])
def test_a_ref_that_leads_to_itself_is_refused_in_words(own):
    with pytest.raises(RequestError, match=r"no text follows it; does a rule or a \$ref lead to itself alone\?"):
        check_grammar(json_schema_grammar({"$defs": {"a": own}, "$ref": "#/$defs/a"}))
