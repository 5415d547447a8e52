"""Drafts change no token, no log probability and no cached block, whatever they guess."""

import random
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckdist.config.draft_config import DraftFlags
from ckdist.engine.draft_gain import DraftGain
from ckdist.engine.drafting import Drafting
from ckdist.engine.engine import Engine
from ckdist.engine.grammars import Grammars
from ckdist.engine.load_model import BUNDLED
from ckdist.engine.ngram_index import NgramIndex, Tail
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.tenant import ONE_TENANT
from ckdist.errors import ConfigError
from ckdist.tokens.grammar import quoted
from ckdist.tokens.tokenizer_source import tokenizer_of
from ckdist.tokens.tool_format import HERMES
from ckdist.tokens.tool_grammar import ToolGrammar
from tests.support.paged_executable import PagedExecutable
from tests.unit.test_engine import greedy
from tests.unit.test_engine_sampling import STATEFUL


def answers(engine: Engine, requests) -> list[tuple]:
    """Adds (prompt, params) with some steps between them. Returns the tokens, log probabilities and end of each."""
    made = [([], [], []) for _ in requests]
    todo = list(enumerate(requests))
    while todo or engine.has_work:
        if todo:
            id, (prompt, params) = todo.pop(0)
            engine.add(id, prompt, params)
        for output in engine.step():
            tokens, logprobs, ends = made[output.id]
            tokens += output.tokens
            logprobs += output.logprobs or []
            ends += [output.finish_reason] if output.finish_reason else []
    pool = engine.pool
    assert pool.available == pool.num_blocks
    assert pool.states is None or pool.states.available == pool.states.num_slots
    return made


def spoilt(texts, draw: random.Random, vocab: int = 50) -> Drafting:
    """Drafts always, from earlier answers of which some tokens are wrong."""
    drafting = Drafting("suffix", by_gain=False, most=draw.randint(1, 16))
    for text in texts:
        wrong = [draw.randrange(vocab) if draw.random() < 0.1 else token for token in text]
        drafting._archive.add(ONE_TENANT, np.array(wrong, np.int32))
    return drafting


def small(draw: random.Random, slots: int, in_flight: int) -> PagedExecutable:
    return PagedExecutable(draw.randint(12, 40), draw.randint(20, 60), 4, 50, 110, slots, in_flight)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.booleans(), st.integers(1, 2))
def test_no_interleaving_of_drafts_and_preemptions_changes_an_answer(seed, has_states, in_flight):
    draw = random.Random(seed)
    prefix = [draw.randrange(50) for _ in range(40)]
    requests = []
    for i in range(6):
        prompt = [*prefix[: draw.randrange(41)], draw.randrange(50)]
        fields = draw.choice([{}, {"logprobs": 2}, {"temperature": 1.0}, {"repetition_penalty": 1.3}])
        stops = (draw.randrange(50),) if draw.random() < 0.3 else ()
        fields = {"temperature": 0.0, "seed": i, "stop_token_ids": stops, **fields}
        requests.append((prompt, SamplingParams(draw.randint(1, 60), **fields)))
    slots = draw.randint(4, 16) if has_states else 0
    plain = answers(Engine(small(draw, slots, in_flight), Sampler(50), {7}), requests)
    executable, drafting = small(draw, slots, in_flight), spoilt([tokens for tokens, _, _ in plain], draw)
    assert answers(Engine(executable, Sampler(50), {7}, make_drafting=lambda: drafting), requests) == plain


@pytest.mark.parametrize("fields", STATEFUL)
def test_samplers_with_a_history_draw_the_same_tokens_with_drafts(fields):
    params = SamplingParams(max_tokens=40, seed=5, **{**fields, "stop_token_ids": ()})
    requests = [([1 + i, 2, 3], params) for i in range(3)]
    plain = answers(Engine(PagedExecutable(7), Sampler(50)), requests)
    drafting = spoilt([tokens for tokens, _, _ in plain], random.Random(3))
    assert answers(Engine(PagedExecutable(7), Sampler(50), make_drafting=lambda: drafting), requests) == plain
    assert drafting.gain.accepted > 20 and drafting.gain.drafted > drafting.gain.accepted


@pytest.mark.parametrize("slots", [0, 12])
def test_right_drafts_save_steps_and_are_cached_like_other_tokens(slots):
    prompt, params = list(range(20)), greedy(100)
    executable = PagedExecutable(state_slots=slots)
    (plain,) = answers(Engine(executable, Sampler(50)), [(prompt, params)])
    drafted = PagedExecutable(state_slots=slots)
    engine = Engine(drafted, Sampler(50), make_drafting=lambda: Drafting("suffix", by_gain=False))
    for steps in 100, 12 + 7 * bool(slots):
        begin = len(drafted.batches)
        assert answers(engine, [(prompt, params)]) == [plain]
        assert len(drafted.batches) - begin <= steps
    engine.add("next", [*prompt, *plain[0], 1], greedy(1))
    (output,) = engine.step()
    assert output.cached_tokens == 112


CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
CALLS = ToolGrammar(HERMES, quoted).lark({"get_weather": CITY}, True, None)
GRAMMARS = (
    '%llguidance {}\nstart: "The answer is " /[a-z]{30}/ ", or perhaps " /[0-9 ]{9}/ "."',
    f"%llguidance {{}}\n{CALLS}",
)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=["text", "calls of tools"])
def test_grammars_prune_drafts_and_their_forced_tokens_stay(grammar):
    tokenizer = tokenizer_of(BUNDLED)
    vocab = tokenizer.vocab_size
    grammars = Grammars(tokenizer, vocab)
    requests = [
        ([5], SamplingParams(max_tokens=60, seed=seed, grammar=grammar, logprobs=logprobs))
        for seed in (1, 2)
        for logprobs in (None, 0)
    ]
    plain = answers(
        Engine(PagedExecutable(vocab_size=vocab), Sampler(vocab), tokenizer.eos_token_ids, grammars=grammars), requests
    )
    drafting = spoilt([tokens for tokens, _, _ in plain], random.Random(1), vocab)
    engine = Engine(
        PagedExecutable(vocab_size=vocab),
        Sampler(vocab),
        tokenizer.eos_token_ids,
        grammars=grammars,
        make_drafting=lambda: drafting,
    )
    assert answers(engine, requests) == plain
    assert drafting.gain.accepted > 10


def test_a_request_has_a_least_number_of_drafts():
    prompt = list(range(20))
    engine = Engine(PagedExecutable(), Sampler(50), make_drafting=lambda: Drafting("suffix", 4, by_gain=False))
    counts = []
    for least in None, None, 5:
        answers(engine, [(prompt, SamplingParams(60, temperature=0.0, draft_min=least))])
        counts.append(engine.drafting.gain.drafted)
    assert counts[1] == counts[2] > 0


def test_tenants_see_no_answers_of_each_other():
    executable, drafting = PagedExecutable(), Drafting("suffix", by_gain=False)
    engine = Engine(executable, Sampler(50), make_drafting=lambda: drafting)
    for tenant, has_drafts in (b"a", False), (b"b", False), (None, False), (b"a", True):
        drafted = drafting.gain.drafted
        engine.add(tenant, [1, 2, 3], greedy(40), tenant)
        while engine.has_work:
            engine.step()
        assert (drafting.gain.drafted > drafted + 30) == has_drafts


def test_tokens_that_are_added_one_by_one_or_together_are_found_alike():
    tokens = np.random.default_rng(0).integers(0, 50_000, 3000).astype(np.int32)
    tokens[2000:2100] = tokens[100:200]
    whole, grown, tail = NgramIndex(tokens), NgramIndex(tokens), Tail()
    whole.extend(2050)
    for token in tokens[:2050].tolist():
        tail.add(token)
        grown.add(tail)
    tails = [Tail(tokens[end - 8 : end].tolist()) for end in range(2008, 2050)]
    places = [grown.find(tail) for tail in tails]
    assert [place for place, _ in places] == list(range(2008, 2050)) and sum(common for _, common in places) > 8 * 38
    assert places == [whole.find(tail) for tail in tails]
    assert whole.find(Tail([1, 2, 3])) == (0, 0)


def run_gain(seconds, right, steps: int, sequences: int = 1) -> tuple[DraftGain, np.ndarray]:
    """Steps with drafts of probability 0.7 each. Returns the steps lost until each step.

    `right`: the step's number and the lost steps of its window -> probability that a draft is right.
    """
    gain, draw, lost = DraftGain(), random.Random(0), [0.0]
    for step in range(steps):
        count = gain.choose(sequences, [0.7 ** (i + 1) for i in range(8)])
        part, accepted = right(step, gain._lost), 0
        while accepted < count and draw.random() < part:
            accepted += 1
        cost = seconds(sequences + count)
        if count:
            gain.observe(sequences, count, accepted, sum(0.7 ** (i + 1) for i in range(count)), cost)
        else:
            gain.observe_plain(sequences, cost)
        lost.append(cost / seconds(sequences) - (sequences + accepted) / sequences)
    return gain, np.cumsum(lost)


ADVERSARIES = {
    "wrong": lambda _step, _lost: 0.0,
    "right, then wrong": lambda step, _lost: float(step % 500 < 300),
    "in turn": lambda step, _lost: float(step % 2),
    "by chance": lambda _step, _lost: 0.6,
    "mostly right": lambda _step, _lost: 0.85,
    "right until something is lost": lambda step, lost: float(lost == 0 and step % 9 > 0),
    "wrong as soon as the model trusts them": lambda step, lost: float(step % 60 < 40 or lost > 1.2),
}


@pytest.mark.parametrize("right", ADVERSARIES.values(), ids=ADVERSARIES)
def test_no_drafts_lose_more_than_a_hundredth_of_200_steps(right):
    """Whatever they gained before, and also in shorter windows."""
    for slope, sequences in (0.05, 1), (0.3, 1), (0.57, 1), (0.57, 3), (1.0, 1):
        _, lost = run_gain(lambda rows, slope=slope: 1 + slope * (rows - 1), right, 800, sequences)
        worst = max((lost[begin : begin + 201] - lost[begin]).max() for begin in range(len(lost)))
        assert worst <= 2 + 1e-9, (slope, sequences)


def test_drafts_are_as_many_as_pay():
    gain, lost = run_gain(lambda rows: 1 + 0.05 * (rows - 1), lambda *_: 0.9, 500)
    assert lost[-1] < -600 and gain.measured / gain.seconds > 0.8
    gain, lost = run_gain(float, lambda *_: 0.7, 500)
    assert gain.steps < 5
    gain, lost = run_gain(lambda rows: 1.0 if rows <= 4 else 2.0, lambda *_: 0.8, 500)
    gain.observe_plain(1, 1.0)
    assert gain.choose(1, [0.7, 0.5, 0.4, 0.3, 0.2]) == 3


@pytest.mark.parametrize(
    "given, spec, most",
    [
        ({}, "auto", 16),
        ({"spec": "ngram-mod", "draft_max": 3}, "ngram", 3),
        ({"spec": "none"}, "off", 16),
        ({"speculative_config": '{"method": "suffix", "num_speculative_tokens": 5}'}, "suffix", 5),
        ({"spec": "draft-mtp", "draft_max": 1}, "mtp", 1),
        ({"speculative_config": '{"method": "deepseek_mtp", "num_speculative_tokens": 2}'}, "mtp", 2),
        ({"spec": "mtp", "model_draft": "x"}, "--spec mtp and --model-draft x both draft: leave one out", 0),
        ({"draft_min": 9, "draft_max": 8}, "--draft-min (9) is more than --draft-max (8)", 0),
        (
            {"speculative_config": '{"method": "eagle"}'},
            "--speculative-config: method eagle is not supported: a model of its own kind predicts drafts",
            0,
        ),
        ({"speculative_config": '{"model": "x", "num_speculative_tokens": 3}'}, "model", 3),
        ({"speculative_config": '{"model": "x", "method": "ngram"}'}, "--speculative-config: model x must be", 0),
        ({"speculative_config": '{"eagle": "x"}'}, "--speculative-config: eagle is not supported", 0),
        ({"spec": "draft-simple", "model_draft": "x"}, "model", 16),
        ({"spec": "model"}, "--spec model needs a small model: give --model-draft FILE", 0),
        ({"model_draft": ""}, "--model-draft is empty", 0),
        ({"speculative_config": "[1]"}, "--speculative-config [1] is not a JSON object", 0),
    ],
)
def test_names_of_other_servers_are_read_and_missing_drafters_are_refused(given, spec, most):
    if most:
        flags = DraftFlags(**given)
        assert (flags.spec, flags.draft_max) == (spec, most)
    else:
        with pytest.raises(ConfigError, match=re.escape(spec)):
            DraftFlags(**given)
