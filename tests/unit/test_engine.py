"""The engine over a simulated paged cache: every sequence gets exactly what it would get alone."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckdist.engine.engine import Engine
from ckdist.engine.queue_place import QueuePlace
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.scheduler import EngineBusy
from ckdist.errors import NativeError, RequestError
from ckdist.program.stage_costs import StageCosts
from tests.support.paged_executable import PagedExecutable, PlainSampler, alone, log_softmax, prefix_logits

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def finish(engine, limit=10_000) -> dict:
    """Steps until nothing is left; (tokens, last output, all outputs) by id."""
    outputs: dict = {}
    for _ in range(limit):
        if not engine.has_work:
            break
        for output in engine.step():
            outputs.setdefault(output.id, []).append(output)
    assert not engine.has_work, "the engine makes no progress"
    return {
        id: ([token for output in all_of for token in output.tokens], all_of[-1], all_of)
        for id, all_of in outputs.items()
    }


def greedy(max_tokens, **params):
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **params)


requests = st.lists(
    st.tuples(
        st.integers(0, 12),  # the step before which it arrives
        st.integers(0, 3),  # which of four long prefixes it begins with
        st.integers(0, 60),  # how much of it
        st.lists(st.integers(0, 49), min_size=1, max_size=6),  # its own end
        st.integers(0, 40),  # max_tokens
        st.one_of(st.none(), st.integers(0, 3)),  # prompt_logprobs
        st.sampled_from([0.0, 1.0]),
        st.one_of(st.none(), st.integers(1, 30)),  # the step before which it is aborted
        st.builds(QueuePlace, st.sampled_from("abc"), st.booleans(), st.integers(-1, 1)),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests,
    st.integers(8, 24),
    st.integers(1, 120),
    st.integers(1, 5),
    st.integers(1, 40),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 9)),  # slots of states beside one for each sequence
    st.integers(1, 3),  # steps that are under way
    st.sampled_from([math.inf, 1e-3]),  # seconds of a step
)
@example(  # batches give way, and no block becomes free, since another sequence uses them, too
    [
        (step, 0, prefix, [0], 0, None, 0.0, None, QueuePlace(client, batch, 0))
        for step, prefix, client, batch in (
            (0, 0, "a", False), (0, 48, "a", True), (0, 0, "a", True), (1, 16, "c", False), (1, 32, "c", False),
        )
    ],
    10, 5, 3, 3, True, None, 2, math.inf,
)  # fmt: skip
def test_everyone_gets_what_they_would_get_alone(
    requests, num_blocks, max_tokens, max_sequences, max_outputs, prefix_reuse, more_slots, in_flight, seconds
):
    slots = 0 if more_slots is None else max_sequences + more_slots
    executable = PagedExecutable(num_blocks, max_tokens, max_sequences, 50, 110, slots, in_flight)
    more = {"prefix_reuse": prefix_reuse, "max_step_seconds": seconds}
    engine = Engine(executable, PlainSampler(), max_outputs=max_outputs, **more)
    prefixes = np.random.default_rng(0).integers(0, 50, (4, 60)).tolist()
    pending, outputs, want = {}, {}, {}
    for i, (arrival, which, length, end, tokens, scores, temperature, *_) in enumerate(requests):
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=i, prompt_logprobs=scores)
        pending[i] = arrival, prefixes[which][:length] + end, params
    want = dict(pending)
    for step in range(3000):
        for i, (arrival, prompt, params) in list(pending.items()):
            if arrival <= step:
                engine.add(i, prompt, params, place=requests[i][8])
                del pending[i]
        for i, request in enumerate(requests):
            if request[7] == step and (output := engine.abort(i)) is not None:
                assert output.finish_reason == "abort"
                outputs.setdefault(i, []).append(output)
        for output in engine.step():
            outputs.setdefault(output.id, []).append(output)
        if not pending and not engine.has_work:
            break
    else:
        pytest.fail("the engine makes no progress")
    assert engine.pool.available == num_blocks
    assert engine.states is None or engine.states.available == slots
    for i, (_, prompt, params) in want.items():
        tokens = [token for output in outputs[i] for token in output.tokens]
        expected = alone(prompt, params, seed=i, limit=110)
        if outputs[i][-1].finish_reason == "abort":
            assert tokens == expected[: len(tokens)]
            continue
        assert tokens == expected and outputs[i][-1].finish_reason == "length"
        if params.prompt_logprobs is not None:
            check_prompt_logprobs(prompt, params.prompt_logprobs, outputs[i])


def check_prompt_logprobs(prompt, top, outputs):
    entries = outputs[0].prompt_logprobs
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    assert len(entries) == len(prompt) and entries[0] is None
    for position in range(1, len(prompt)):
        values = log_softmax(prefix_logits(prompt[:position], 50))
        assert entries[position][0] == pytest.approx(values[prompt[position]])
        assert [token for token, _ in entries[position][1]] == np.argsort(-values)[:top].tolist()


def test_a_prompt_seen_before_is_counted_as_cached():
    engine = Engine(PagedExecutable(), PlainSampler())
    prompt = list(range(40))
    for id, cached in (("first", 0), ("second", 32), ("scored", 0)):
        engine.add(id, prompt, greedy(3, prompt_logprobs=0 if id == "scored" else None))
        tokens, last, _ = finish(engine)[id]
        assert tokens == alone(prompt, GREEDY)[:3]
        assert (last.prompt_tokens, last.cached_tokens) == (40, cached)
    assert engine.stats()["cached_tokens_total"] == 32


@pytest.mark.parametrize("slots", [0, 3, 20])
def test_a_conversation_reuses_its_own_answers(slots):
    """Of a model whose layers keep states, too: decoding leaves a snapshot behind each block that it fills."""
    engine = Engine(PagedExecutable(state_slots=slots), PlainSampler())
    engine.add(0, list(range(20)), greedy(30))
    answer = finish(engine)[0][0]
    engine.add(1, [*range(20), *answer, 7], greedy(1))
    assert finish(engine)[1][1].cached_tokens == 48  # 49 of the 50 tokens were computed, in 3 full blocks


def test_a_branch_that_was_seen_once_is_reused_from_then_on():
    """Three prompts begin alike and end otherwise: where the second one leaves the first, it saves a state."""
    engine = Engine(PagedExecutable(state_slots=20), PlainSampler())
    common, cached = list(np.random.default_rng(5).integers(0, 50, 100)), []
    for id in range(3):
        engine.add(id, [*common, *[id] * 30], greedy(2))
        cached.append(finish(engine)[id][1].cached_tokens)
    assert cached == [0, 0, 96]


@pytest.mark.parametrize("max_tokens", [32, 256])
def test_choices_of_one_prompt_begin_with_its_state(max_tokens):
    """They wait for it where the first one's whole prompt is in the step that they come to."""
    engine = Engine(PagedExecutable(max_tokens=max_tokens, state_slots=20), PlainSampler())
    prompt = list(np.random.default_rng(6).integers(0, 50, 100))
    for id in range(4):
        engine.add(id, prompt, greedy(20))
    done = finish(engine)
    assert [done[id][1].cached_tokens for id in range(4)] == [0, 96, 96, 96]
    assert all(done[id][0] == alone(prompt, greedy(20)) for id in range(4))


def test_snapshots_give_way_in_the_order_of_use():
    """Three slots: one is the running sequence's, so two prompts' states stay."""
    engine, prompts = Engine(PagedExecutable(state_slots=3), PlainSampler()), [[i] * 40 for i in range(3)]

    def cached(i) -> int:
        engine.add("again", prompts[i], greedy(1))
        return finish(engine)["again"][1].cached_tokens

    assert [cached(i) for i in (0, 1, 0, 2, 0, 1)] == [0, 0, 32, 0, 32, 0]


def test_the_last_slot_is_the_snapshot_itself():
    """Two slots, one of them another sequence's: a prompt that comes again goes on from its snapshot and uses it up."""
    engine, prompt = Engine(PagedExecutable(max_sequences=2, state_slots=2), PlainSampler()), [7] * 40
    cached = []
    for id in ("first", "again", "last"):
        if id == "again":
            engine.add("other", [8] * 5, greedy(100))
            engine.step()
        engine.add(id, prompt, greedy(1))
        done = {}
        while id not in done:
            done |= {output.id: output for output in engine.step() if output.finish_reason}
        cached.append(done[id].cached_tokens)
    assert cached == [0, 32, 0]


def test_ends_on_eos_and_stop_ids_without_giving_them():
    prompt = [1, 2, 3]
    text = alone(prompt, GREEDY)
    assert len(set(text[:4])) == 4
    for engine, params in (
        (Engine(PagedExecutable(), PlainSampler(), {text[3]}), greedy(8, logprobs=1)),
        (
            Engine(PagedExecutable(), PlainSampler(), {text[1]}),
            greedy(8, logprobs=1, stop_token_ids=(text[3],), ignore_eos=True),
        ),
    ):
        engine.add(0, prompt, params)
        tokens, last, outputs = finish(engine)[0]
        assert tokens == text[:3] and last.finish_reason == "stop"
        assert last.stop_token == (text[3] if params.stop_token_ids else None)
        assert [len(output.logprobs) for output in outputs] == [1, 1, 1, 0]


def test_logprobs_belong_to_their_tokens():
    engine = Engine(PagedExecutable(), PlainSampler())
    engine.add(0, [5, 6], greedy(5, logprobs=3))
    engine.add(1, [5, 7], greedy(5))
    results = finish(engine)
    tokens, _, outputs = results[0]
    for i, output in enumerate(outputs):
        values = log_softmax(prefix_logits([5, 6, *tokens[:i]], 50))
        ((chosen, top),) = output.logprobs
        assert chosen == pytest.approx(values[tokens[i]]) and top[0][0] == tokens[i] and len(top) == 3
    assert results[1][1].logprobs is None


def test_stops_at_the_context_and_asks_for_no_logits_in_vain():
    executable = PagedExecutable(max_tokens=8, context_length=30)
    engine = Engine(executable, PlainSampler())
    engine.add(0, list(range(25)), greedy(100))
    tokens, last, _ = finish(engine)[0]
    assert len(tokens) == 5 and last.finish_reason == "length"
    assert executable.outputs == [0, 0, 0, 1, 1, 1, 1, 1]


def test_scores_a_prompt_without_generating():
    engine = Engine(PagedExecutable(max_tokens=7), PlainSampler())
    engine.add(0, list(range(20)), greedy(0, prompt_logprobs=2))
    tokens, last, outputs = finish(engine)[0]
    assert tokens == [] and last.finish_reason == "length"
    check_prompt_logprobs(list(range(20)), 2, outputs)


@pytest.mark.parametrize("prefix_reuse", [True, False])
def test_preempted_while_its_prompt_is_scored(prefix_reuse):
    engine = Engine(PagedExecutable(num_blocks=7, max_tokens=2), PlainSampler(), prefix_reuse=prefix_reuse)
    engine.add("first", list(range(16)), greedy(40))
    while not engine.scheduler.running or engine.scheduler.running[0].computed < 16:
        engine.step()
    engine.add("scored", list(range(10, 50)) + [1] * 20, greedy(2, prompt_logprobs=1))
    results = finish(engine)
    assert engine.scheduler.preemptions == 1
    check_prompt_logprobs(list(range(10, 50)) + [1] * 20, 1, results["scored"][2])
    assert results["scored"][0] == alone(list(range(10, 50)) + [1] * 20, greedy(2))


def test_logits_that_are_no_numbers_end_one_sequence_alone():
    class Careful(PlainSampler):
        def sample(self, logits, rows):
            if not np.isfinite(logits).all():
                raise NativeError("logits are not finite")
            return super().sample(logits, rows)

    class Broken(PagedExecutable):
        def run(self, batch):
            logits = super().run(batch)
            logits[[batch.token_ids[i] == 13 for i in batch.logits_indices]] = np.nan
            return logits

    engine = Engine(Broken(), Careful())
    for id, prompt in enumerate([[1, 2], [13], [3, 4]]):
        engine.add(id, prompt, greedy(3))
    results = finish(engine)
    assert (results[1][1].finish_reason, results[1][1].error) == ("error", "logits are not finite")
    assert results[0][0] == alone([1, 2], greedy(3)) and results[2][0] == alone([3, 4], greedy(3))


def test_all_logits_beside_running_sequences():
    engine = Engine(PagedExecutable(max_tokens=7), PlainSampler())
    engine.add(0, [1, 2, 3], greedy(20))
    engine.step()
    ids = list(range(18))
    chunks = np.concatenate([chunk.copy() for chunk in engine.logits(ids)])
    assert np.array_equal(chunks, [prefix_logits(ids[: i + 1], 50) for i in range(18)])
    assert finish(engine)[0][1].finish_reason == "length" and engine.pool.available == 64


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        (
            [1] * 512,
            {},
            (
                "prompt of 512 tokens does not fit the context of 512, which holds 511 and the output; "
                "shorten the prompt or raise --ctx-size"
            ),
        ),
        ([], {}, "prompt is empty"),
        ([1, 50], {}, "token id 50 is outside the vocabulary of 50"),
        ([1, -1], {}, "token id -1 is outside"),
        ([1, 2.5], {}, "must hold token ids"),
        ([1, [2]], {}, "must hold token ids"),
        ([1, 2**70], {}, "must hold token ids"),
        ([1], {"max_tokens": -1}, "max_tokens must be an integer from 0"),
        ([1], {"max_tokens": True}, "max_tokens must be an integer"),
        ([1], {"temperature": float("nan")}, "temperature must be a number from 0 to 100, not nan"),
        ([1], {"top_p": "1"}, "top_p must be a number"),
        ([1], {"logprobs": 21}, "logprobs must be an integer from 0 to 20"),
        ([1], {"stop_token_ids": (50,)}, "stop_token_ids must be an integer from 0 to 49"),
        ([1], {"stop_token_ids": 3}, "stop_token_ids must be a list"),
        ([1], {"logit_bias": {1: float("inf")}}, "logit_bias must be a number from -100 to 100"),
        ([1], {"logit_bias": {"1": 1.0}}, "logit_bias must be an integer"),
        ([1], {"seed": 2**64}, "seed must be an integer"),
        ([1], {"ignore_eos": 1}, "ignore_eos must be true or false"),
    ],
)
def test_refuses_what_is_wrong(prompt, params, message):
    engine = Engine(PagedExecutable(), PlainSampler())
    with pytest.raises(RequestError, match=message.replace("(", "\\(")):
        engine.add(0, prompt, SamplingParams(**params))
    assert not engine.has_work


def test_refuses_what_a_small_cache_can_never_hold():
    engine = Engine(PagedExecutable(num_blocks=3), PlainSampler())
    with pytest.raises(RequestError, match="prompt of 48 tokens does not fit the KV cache of 48 positions"):
        engine.add(0, [1] * 48, GREEDY)
    engine.add(0, [1] * 47, GREEDY)
    assert len(finish(engine)[0][0]) == 1


def test_refuses_an_id_in_use_and_a_full_queue():
    engine = Engine(PagedExecutable(), PlainSampler(), max_waiting=1)
    engine.add(0, [1], GREEDY)
    with pytest.raises(RequestError, match="id is running"):
        engine.add(0, [1], GREEDY)
    with pytest.raises(EngineBusy):
        engine.add(1, [1], GREEDY)
    assert engine.abort(1) is None and engine.abort(0).finish_reason == "abort"
    assert not engine.has_work


def test_logits_beside_what_runs_need_room():
    engine = Engine(PagedExecutable(num_blocks=4, context_length=64), PlainSampler())
    with pytest.raises(RequestError, match=r"65 tokens do not fit .*--ctx-size"):
        next(engine.logits([1] * 65))
    engine.add("runs", [1] * 40, greedy(8))
    engine.step()
    with pytest.raises(RequestError, match=r"40 tokens need 3 blocks of the KV cache and 1 are free"):
        next(engine.logits([1] * 40))
    before = engine.pool.available
    rows = np.concatenate([part.copy() for part in engine.logits([3, 4, 5])])
    np.testing.assert_array_equal(rows[-1], prefix_logits(np.array([3, 4, 5]), engine.vocab_size))
    assert engine.pool.available == before


def test_two_stages_have_work_at_once():
    """Of eight sequences each step decodes four, and while one step is under way the other four's is issued; a prompt
    goes in pieces that follow one another.
    """
    executable = PagedExecutable(in_flight=2, max_tokens=512, context_length=512)
    engine = Engine(executable, PlainSampler())
    for i in range(8):
        engine.add(i, [i], greedy(30))
    while engine.has_work:
        engine.step()
    steps = [len(chunks) for chunks in executable.batches if all(tokens == 1 for tokens, _ in chunks)]
    assert steps.count(4) > 0.8 * len(steps) and executable.most_under_way == 2
    before = len(executable.batches)
    engine.add(8, list(range(50)) * 10, greedy(1))
    while engine.has_work:
        engine.step()
    assert executable.batches[before:] == [[[128, 0]], [[128, 128]], [[128, 256]], [[116, 384]]]


def test_sequences_decode_in_one_step_where_weights_are_read_long_and_a_stage_has_most_of_them():
    """Those that came by themselves join the others."""
    executable = PagedExecutable(in_flight=2, max_tokens=512, context_length=512)
    executable.costs = StageCosts(2, 40.0, slowest=0.65)
    engine = Engine(executable, PlainSampler())
    for i in range(8):
        engine.add(i, [i, 1], greedy(30))
        engine.step()
    while engine.has_work:
        engine.step()
    steps = [len(chunks) for chunks in executable.batches]
    assert steps.count(8) > 20 and max(steps) == 8


def test_how_large_the_steps_of_stages_are():
    """The number of pieces is the best one for what a step costs; pieces of a long prompt take equally long."""
    costs = StageCosts(2, 40.0, 2000.0, 0.65)
    seconds = lambda n, work: (n + 1) * (40 + work / n)
    for tokens in (500, 2048, 20000):
        work = costs.work(0, tokens)
        assert seconds(costs.pieces(work), work) <= min(seconds(n, work) for n in range(1, 300)) * 1.001
    ends = [0]
    while ends[-1] < 4000:
        left = costs.work(ends[-1], 4000)
        ends.append(min(4000, ends[-1] + costs.piece_tokens(300.0, left, ends[-1], 512)))
    works = [costs.work(first, end) for first, end in itertools.pairwise(ends)]
    assert len(works) == 27 and works == pytest.approx([costs.work(0, 4000) / 27] * 27, rel=0.12)
    assert costs.pieces(20.0) == 1 and costs.piece_tokens(20.0, 200.0, 0, 512) == 64
    assert costs.piece_tokens(300.0, 1200.0, 0, 128) == 128
    assert [costs.groups(count) for count in (0, 1, 8, 64)] == [1, 1, 1, 2]
    assert StageCosts(3, 40.0, slowest=0.4).groups(2) == 2 and StageCosts().piece_tokens(20.0, 200.0, 0, 512) == 512


def test_the_last_abort_leaves_nothing_under_way():
    executable = PagedExecutable(in_flight=3)
    engine = Engine(executable, PlainSampler())
    for i in range(3):
        engine.add(i, [i, 1], greedy(9))
    engine.step()  # all prompts in one
    engine.step()
    assert len(executable.published) == 2
    for i in range(3):
        assert engine.abort(i).finish_reason == "abort"
    assert not executable.published and engine.step() == [] and not engine.has_work
