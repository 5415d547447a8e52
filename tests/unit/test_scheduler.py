"""The scheduler: who computes what in a step, within budgets of tokens, outputs and blocks."""

import random
from itertools import product

import pytest

from ckdist.engine.block_pool import BlockPool
from ckdist.engine.pooling import Pooling
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.scheduler import PASSING_SECONDS, EngineBusy, Scheduler
from ckdist.engine.sequence import Sequence, State
from tests.support.cases import cases


def make(num_blocks=64, max_tokens=32, max_sequences=4, max_outputs=32, max_waiting=8, **more):
    return Scheduler(BlockPool(num_blocks), max_tokens, max_sequences, max_outputs, max_waiting, **more)


def sequence(id, prompt, **params):
    params = SamplingParams(**{"max_tokens": 100, **params})
    return Sequence(id, list(prompt), params, 0, min(len(prompt) + params.max_tokens, 512), 0.0)


def roles_of(step):
    return {chunk.first + i < len(chunk.sequence.prompt) for chunk in step.chunks for i in range(chunk.tokens)}


def advance(scheduler):
    """One step in which every sampled token is 9; what each run computed, as (id, first, tokens, rows)."""
    step = scheduler.schedule()
    if step is None:
        return []
    scheduler.commit(step)
    for chunk in step.chunks:
        if chunk.samples:
            chunk.sequence.append(9)
    return [(chunk.sequence.id, chunk.first, chunk.tokens, chunk.rows) for chunk in step.chunks]


def test_decode_comes_first_and_a_long_prompt_fills_the_rest():
    scheduler = make()
    scheduler.add(sequence("short", range(5)))
    assert advance(scheduler) == [("short", 0, 5, 1)]
    scheduler.add(sequence("long", range(70)))
    assert advance(scheduler) == [("short", 5, 1, 1), ("long", 0, 31, 0)]
    assert advance(scheduler) == [("short", 6, 1, 1), ("long", 31, 31, 0)]
    assert advance(scheduler) == [("short", 7, 1, 1), ("long", 62, 8, 1)]
    assert advance(scheduler) == [("short", 8, 1, 1), ("long", 70, 1, 1)]


def test_first_come_first_served_up_to_max_sequences():
    scheduler = make(max_sequences=2)
    sequences = [sequence(i, [i] * 20) for i in range(3)]
    for one in sequences:
        scheduler.add(one)
    assert [run[:3] for run in advance(scheduler)] == [(0, 0, 20), (1, 0, 12)]
    assert [run[:3] for run in advance(scheduler)] == [(0, 20, 1), (1, 12, 8)]
    scheduler.remove(sequences[0])
    assert [run[:3] for run in advance(scheduler)] == [(1, 20, 1), (2, 0, 20)]
    assert sequences[0].state is State.FINISHED


def test_a_full_prompt_in_the_cache_still_computes_its_last_token():
    scheduler = make()
    prompt = [1] * 48
    scheduler.add(sequence("a", prompt))
    while advance(scheduler)[-1][3] == 0:
        pass
    scheduler.add(sequence("b", prompt))
    scheduler.add(sequence("scored", prompt, prompt_logprobs=0))
    chunks = advance(scheduler)
    assert chunks[1] == ("b", 32, 16, 1)
    assert chunks[2] == ("scored", 0, 15, 15)
    assert scheduler.running[1].cached_tokens == 32 and scheduler.running[2].cached_tokens == 0
    assert scheduler.running[1].block_table[:3].tolist() == scheduler.running[0].block_table[:3].tolist()


def test_choices_of_one_prompt_wait_for_it_and_share_it():
    scheduler = make()
    for id in "abc":
        scheduler.add(sequence(id, [1] * 100))
    scheduler.add(sequence("other", [2] * 10))
    steps = [advance(scheduler) for _ in range(4)]
    assert [[chunk[0] for chunk in chunks] for chunks in steps] == [["a"]] * 3 + [["a", "b", "c", "other"]]
    assert [chunk[1:3] for chunk in steps[3]] == [(96, 4), (96, 4), (96, 4), (0, 10)]


def test_the_latest_arrival_gives_way_and_keeps_its_output():
    scheduler = make(num_blocks=4)
    first, second = sequence("first", [1] * 30), sequence("second", [2] * 10)
    scheduler.add(first)
    scheduler.add(second)
    while not scheduler.preemptions:
        advance(scheduler)
    assert (first.state, second.state) == (State.RUNNING, State.WAITING)
    assert len(second.output) > 0 and second.num_blocks == 0 and list(scheduler.waiting) == [second]
    tokens = second.length
    scheduler.remove(first)
    (chunk,) = advance(scheduler)
    assert chunk[0] == "second" and chunk[1] + chunk[2] == tokens and chunk[3] == 1


def test_a_head_that_does_not_fit_is_passed_until_it_has_waited_too_long():
    now = [0.0]
    scheduler = make(num_blocks=7, max_tokens=64, clock=lambda: now[0])
    scheduler.add(sequence("a", [1] * 60))
    advance(scheduler)
    scheduler.add(sequence("big", [2] * 50))
    scheduler.add(sequence("small", [3] * 4))
    assert [chunk[0] for chunk in advance(scheduler)] == ["a", "small"]
    scheduler.remove(scheduler.running[1])
    now[0] = PASSING_SECONDS + 1
    scheduler.add(sequence("late", [4] * 4))
    assert [chunk[0] for chunk in advance(scheduler)] == ["a"]
    scheduler.remove(scheduler.running[0])
    assert [chunk[0] for chunk in advance(scheduler)] == ["big", "late"]


def test_prompt_logprobs_stay_within_the_output_budget():
    scheduler = make(max_outputs=6)
    scheduler.add(sequence("a", [1] * 3))
    advance(scheduler)
    scheduler.add(sequence("scored", range(12), prompt_logprobs=0))
    (scored,) = scheduler.waiting
    seen = []
    while not len(scored.output):
        chunks = advance(scheduler)
        scored.scored = min(scored.computed, 11)
        assert sum(chunk[3] for chunk in chunks) <= 6
        seen += [chunk[1:] for chunk in chunks if chunk[0] == "scored"]
    assert seen == [(0, 5, 5), (5, 5, 5), (10, 2, 2)]


def test_the_queue_has_an_end():
    scheduler = make(max_waiting=1)
    scheduler.add(sequence("a", [1]))
    with pytest.raises(EngineBusy, match="1 requests are waiting, of at most 1; try again later"):
        scheduler.add(sequence("b", [1]))
    assert scheduler.schedule() is not None
    scheduler.add(sequence("b", [1]))


def test_nothing_to_do():
    assert make().schedule() is None


def test_a_prompt_waits_for_a_long_beginning_that_another_computes():
    scheduler = make(max_tokens=48)
    prompt = list(range(100, 196))
    scheduler.add(sequence("first", prompt))
    assert [run[:3] for run in advance(scheduler)] == [("first", 0, 48)]
    scheduler.add(sequence("second", [*prompt, 7]))
    scheduler.add(sequence("short", [1, 2, 3]))
    assert [run[:3] for run in advance(scheduler)] == [("first", 48, 48)], "nobody overtakes, nothing is computed twice"
    runs = advance(scheduler)
    assert [run[0] for run in runs] == ["first", "second", "short"] and runs[1][1:3] == (96, 1)


def test_a_request_knows_the_length_of_the_sequence_whose_cache_it_takes_over():
    scheduler = make()
    first, second = sequence("first", [1] * 40), sequence("second", [1] * 20 + [2] * 20)
    scheduler.add(first)
    advance(scheduler)
    advance(scheduler)
    scheduler.remove(first)
    scheduler.add(second)
    advance(scheduler)
    assert (first.cached_tokens, first.cached_from) == (0, 0)
    assert (second.cached_tokens, second.cached_from) == (16, 41)


@cases("split, seed", product([False, True], range(20)))
def test_all_requests_end_and_every_step_keeps_to_its_budgets(seed, split):
    draw = random.Random(seed)
    sizes = draw.randint(8, 14), draw.randint(8, 64), draw.randint(2, 8), draw.randint(2, 8), 30
    scheduler = make(*sizes, splits_roles=split)
    for id in range(20):
        prompt = [draw.randrange(2)] * draw.choice([1, draw.randint(1, 80)])
        pooling = draw.choice([None, None, Pooling("mean")])
        capacity = len(prompt) + (0 if pooling else draw.randint(1, 40))
        scheduler.add(Sequence(id, prompt, SamplingParams(), 0, capacity, 0.0, pooling=pooling))
    while scheduler.waiting or scheduler.running:
        decoding = [s for s in scheduler.running if s.length - s.computed == 1 and not s.wants_hidden]
        was_running = set(scheduler.running)
        step = scheduler.schedule()
        taken = [chunk.sequence for chunk in step.chunks]
        assert 0 < sum(chunk.tokens for chunk in step.chunks) <= scheduler.max_tokens
        assert sum(chunk.rows for chunk in step.chunks) <= scheduler.max_outputs
        prompts = [c.sequence.id for c in step.chunks if c.tokens > 1 and c.sequence in was_running]
        assert prompts == sorted(prompts), "the oldest comes first"
        assert len(set(taken)) == len(taken) and {s.wants_hidden for s in taken} == {step.hidden}
        assert all(c.first == c.sequence.computed and c.sequence.num_blocks >= c.sequence.blocks for c in step.chunks)
        if split:
            assert step.hidden or roles_of(step) == {step.prompts}
        else:
            assert step.hidden or all(s in taken or s.state is State.WAITING for s in decoding), (
                "a prompt stalls nobody"
            )
        scheduler.commit(step)
        for chunk in step.chunks:
            s = chunk.sequence
            s.scored = min(max(s.scored, s.computed), len(s.prompt) - 1)
            if chunk.samples and s.length < len(s.tokens):
                s.append(draw.randrange(2))
            elif chunk.samples:
                scheduler.remove(s)
    assert scheduler.pool.available == scheduler.pool.num_blocks


def test_steps_of_split_roles_alternate_and_have_one_role():
    scheduler = make(max_sequences=8, splits_roles=True)
    first = sequence(0, range(40))
    scheduler.add(first)
    steps = []
    for number in range(12):
        if number == 3:
            scheduler.add(sequence(1, range(100, 190)))
        step = scheduler.schedule()
        scheduler.commit(step)
        for chunk in step.chunks:
            if chunk.samples:
                chunk.sequence.append(7)
        steps.append(step)
    assert all(roles_of(step) == {step.prompts} for step in steps)
    assert [step.prompts for step in steps[:3]] == [True, True, False]  # 40 tokens in steps of 32
    assert [step.prompts for step in steps[3:9]] == [True, False] * 3


def test_a_prompt_reuses_no_block_of_generated_tokens_and_a_resumed_sequence_does():
    scheduler = make(max_sequences=8, splits_roles=True)
    first = sequence(0, range(32))
    scheduler.add(first)
    while first.length < 70:
        step = scheduler.schedule()
        scheduler.commit(step)
        for chunk in step.chunks:
            if chunk.samples:
                chunk.sequence.append(7)
    scheduler.remove(first)
    whole = Sequence(1, first.tokens[:70].tolist(), SamplingParams(), 0, 128, 0.0)
    scheduler.add(whole)
    step = scheduler.schedule()
    assert whole.cached_tokens == 32 and roles_of(step) == {True}
    scheduler.remove(whole)
    again = Sequence(2, first.tokens[:32].tolist(), SamplingParams(), 0, 128, 0.0)
    for token in first.tokens[32:70].tolist():
        again.append(token)
    scheduler.add(again)
    step = scheduler.schedule()
    assert again.cached_tokens == 64 and roles_of(step) == {False}
