"""Fairness of the scheduler: turns of clients, classes, priorities, and the limit of a step's seconds. No model."""

import math
from collections import Counter

import pytest

from ckdist.engine.block_pool import BlockPool
from ckdist.engine.queue_place import QueuePlace
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.scheduler import Scheduler
from ckdist.engine.sequence import Sequence, State

DECODE_SECONDS = 0.05


def make(num_blocks=2000, max_tokens=256, max_sequences=8, **more):
    return Scheduler(BlockPool(num_blocks), max_tokens, max_sequences, max_tokens, 1000, **more)


def add(scheduler, id, prompt, output, client="", batch=False, priority=0):
    """Queues a prompt of `prompt` tokens that no other sequence shares."""
    tokens = [hash(id) % 40_000, *([0] * (prompt - 1))]
    params = SamplingParams(max_tokens=output)
    found = Sequence(id, tokens, params, 0, prompt + output, 0.0, place=QueuePlace(client, batch, priority))
    scheduler.add(found)
    return found


def advance(scheduler, seconds=lambda chunks: 0.01):
    """One step, which takes `seconds(chunks)`. Returns its chunks. Ended sequences leave."""
    step = scheduler.schedule()
    if step is None:
        return []
    scheduler.commit(step)
    scheduler.speed.observe(step.chunks, seconds(step.chunks))
    for chunk in step.chunks:
        sequence = chunk.sequence
        if chunk.samples:
            sequence.append(9)
            if sequence.length == len(sequence.tokens):
                scheduler.remove(sequence)
    return step.chunks


def steps_until(scheduler, sequence, most=1000, seconds=lambda chunks: 0.01):
    """Steps until a sequence has ended."""
    for count in range(1, most):
        advance(scheduler, seconds)
        if sequence.state is State.FINISHED:
            return count
    raise AssertionError(f"{sequence.id} has not ended in {most} steps")


def read(chunks, unit=1e-3, growth=0.0, decode=DECODE_SECONDS):
    """Seconds of a step on a machine whose prompts cost `unit` per token, and `growth` more per token of context."""
    prompts = [c for c in chunks if not c.decodes]
    work = sum(c.tokens * (unit + growth * (c.first + c.tokens / 2)) for c in prompts)
    return work + decode * (len(prompts) < len(chunks))


def test_a_short_request_runs_at_once_beside_eight_streams_of_another_client():
    scheduler = make()
    streams = [add(scheduler, i, 20, 3000, "many") for i in range(8)]
    for _ in range(50):
        advance(scheduler)
    for number in range(20):
        assert steps_until(scheduler, add(scheduler, f"short {number}", 8, 2, "few")) == 2
        advance(scheduler)
        assert all(stream.state is State.RUNNING for stream in streams), "the place is given back"
    assert scheduler.displaced == 20 and scheduler.preemptions == 0
    cached = streams[-1].length - streams[-1].computed
    assert cached <= 1, "it goes on from its cached blocks"


def test_a_short_request_passes_long_prompts_of_another_client():
    scheduler = make()
    for i in range(8):
        add(scheduler, i, 3000, 5, "many")
    advance(scheduler)
    assert steps_until(scheduler, add(scheduler, "short", 8, 2, "few")) == 2


def test_a_pool_that_one_client_fills_makes_room_for_another():
    scheduler = make(num_blocks=40, max_sequences=8)
    streams = [add(scheduler, i, 150, 400, "many") for i in range(4)]
    while scheduler.pool.available > 1:
        advance(scheduler)
    short = add(scheduler, "short", 40, 2, "few")
    assert steps_until(scheduler, short) <= 2
    for stream in streams:
        steps_until(scheduler, stream, 5000)
    assert scheduler.pool.available == 40


def test_clients_share_the_places_evenly_and_no_place_changes_hands_twice():
    scheduler = make(max_sequences=8)
    for client in "abc":
        for i in range(10):
            add(scheduler, client + str(i), 20, 200, client)
        for _ in range(3):
            advance(scheduler)
    assert sorted(Counter(s.place.client for s in scheduler.running).values()) == [2, 3, 3]
    before = scheduler.displaced
    for _ in range(50):
        advance(scheduler)
    assert scheduler.displaced == before <= 8


def test_turns_are_by_predicted_seconds_and_not_by_requests():
    """With one place, a client of long prompts gets fewer requests done, and an equal part of the time."""
    scheduler = make(max_sequences=1)
    spent = Counter()
    for i in range(60):
        add(scheduler, f"long {i}", 200, 1, "long")
    for i in range(600):
        add(scheduler, f"short {i}", 20, 1, "short")
    for _ in range(300):
        for chunk in advance(scheduler, read):
            spent[chunk.sequence.place.client] += chunk.tokens
    assert spent["long"] == pytest.approx(spent["short"], rel=0.2) and spent["long"] > 2000


def test_interactive_comes_before_batch_which_takes_what_is_left():
    scheduler = make(max_sequences=4, max_tokens=64)
    batch = [add(scheduler, f"batch {i}", 20, 100, "a", batch=True) for i in range(4)]
    advance(scheduler)
    advance(scheduler)
    assert all(s.state is State.RUNNING for s in batch), "nobody else is there"
    prompts = [add(scheduler, f"now {i}", 100, 10, "a") for i in range(2)]
    first = [chunk.sequence for chunk in advance(scheduler) if not chunk.decodes]
    assert first == [prompts[0]] and batch[-1].state is State.WAITING and batch[0].state is State.RUNNING
    for prompt in prompts:
        steps_until(scheduler, prompt)
    advance(scheduler)
    assert all(s.state is State.RUNNING for s in batch)


def test_batch_is_the_first_to_lose_its_blocks():
    scheduler = make(num_blocks=5)
    batch = add(scheduler, "batch", 20, 60, "a", batch=True)
    advance(scheduler)
    advance(scheduler)
    later = add(scheduler, "later", 20, 60, "b")
    while not scheduler.preemptions:
        advance(scheduler)
    assert batch.state is State.WAITING and later.state is State.RUNNING


def test_a_lower_priority_number_runs_earlier():
    scheduler = make(max_sequences=1)
    running = add(scheduler, "running", 8, 50)
    advance(scheduler)
    order = []
    for name, priority in (("last", 7), ("first", 0), ("second", 0), ("urgent", -3)):
        order.append((priority, name, add(scheduler, name, 8, 2, priority=priority)))
    steps_until(scheduler, order[-1][2])
    assert running.state is State.WAITING, "the urgent one took its place"
    steps_until(scheduler, running)
    ends = []
    while scheduler.waiting or scheduler.running:
        ends += [chunk.sequence.id for chunk in advance(scheduler) if chunk.sequence.state is State.FINISHED]
    assert ends == ["first", "second", "last"]


def test_priorities_give_a_client_nothing_of_another():
    scheduler = make(max_sequences=2)
    for i in range(4):
        add(scheduler, f"urgent {i}", 8, 100, "a", priority=-100)
    advance(scheduler)
    assert steps_until(scheduler, add(scheduler, "short", 8, 2, "b", priority=5)) == 2


def test_a_prompt_that_waits_for_a_prefix_is_passed():
    scheduler = make(max_tokens=64)
    for name in "first", "second":
        scheduler.add(Sequence(name, [5] * 600, SamplingParams(), 0, 616, 0.0))
    advance(scheduler)
    steps_until(scheduler, add(scheduler, "short", 8, 2, "b"))
    assert [s.id for s in scheduler.running] == ["first"] and [s.id for s in scheduler.waiting] == ["second"]


@pytest.mark.parametrize("growth", [0.0, 1 / 3000])
@pytest.mark.parametrize("unit", [1e-4, 1e-3, 2e-2])
def test_a_step_with_prompts_keeps_to_its_seconds_while_somebody_decodes(unit, growth):
    scheduler = make(max_tokens=2048, max_step_seconds=0.2)
    cost = lambda chunks: read(chunks, unit, unit * growth)
    add(scheduler, "stream", 20, 8000)
    for _ in range(5):
        advance(scheduler, cost)
    long = add(scheduler, "long", 6000, 2)
    steps = []
    while long.state is not State.FINISHED:
        chunks = advance(scheduler, cost)
        assert chunks[0].sequence.id == "stream", "a step never leaves out a stream"
        steps.append(cost(chunks))
    assert max(steps[3:]) <= 0.2 and max(steps) < 0.4
    assert len(steps) < 1.6 * (6000 * unit * (1 + 3000 * growth) / 0.15) + 5, "it is no slower than it must be"


def test_decoding_that_takes_the_whole_limit_leaves_prompts_a_quarter():
    scheduler = make(max_tokens=2048, max_step_seconds=0.2)
    cost = lambda chunks: read(chunks, decode=0.5)
    add(scheduler, "stream", 20, 8000)
    for _ in range(5):
        advance(scheduler, cost)
    long = add(scheduler, "long", 480, 1)
    assert steps_until(scheduler, long, seconds=cost) == 5, "of 125 ms, a quarter of the decoding"
    slow = lambda chunks: read(chunks, unit=1.0, decode=0.5)
    for _ in range(10):
        advance(scheduler, slow)
    add(scheduler, "slow", 300, 1)
    sizes = [sum(c.tokens for c in advance(scheduler, slow) if c.sequence.id == "slow") for _ in range(30)]
    assert sizes[-1] == min(sizes) == 1, "at least one token"


def test_a_step_is_not_limited_while_nobody_decodes():
    scheduler = make(max_tokens=2048, max_step_seconds=0.2)
    add(scheduler, "long", 6000, 2)
    assert [sum(c.tokens for c in advance(scheduler, read)) for _ in range(3)] == [2048, 2048, 1904]


def test_steps_of_split_roles_keep_to_the_limit_too():
    scheduler = make(max_tokens=2048, max_step_seconds=0.2, splits_roles=True)
    add(scheduler, "stream", 20, 8000)
    for _ in range(5):
        advance(scheduler, read)
    long = add(scheduler, "long", 2000, 2)
    roles, seconds = [], []
    while long.reads_prompt:
        step = scheduler.schedule()
        scheduler.commit(step)
        scheduler.speed.observe(step.chunks, read(step.chunks))
        for chunk in step.chunks:
            if chunk.samples:
                chunk.sequence.append(9)
        roles.append(step.prompts)
        seconds.append(read(step.chunks))
    assert roles == [i % 2 == 0 for i in range(len(roles))] and max(seconds) <= 0.2


def test_a_limit_of_seconds_changes_no_order_and_ends_everything():
    scheduler = make(max_tokens=128, max_sequences=4, num_blocks=60, max_step_seconds=0.02)
    for i in range(60):
        add(scheduler, i, 10 + 7 * i % 300, 1 + i % 40, "abc"[i % 3], i % 5 == 0, i % 3 - 1)
    for _ in range(20_000):
        if not advance(scheduler, lambda chunks: read(chunks, decode=0.01)):
            break
    assert not scheduler.waiting and not scheduler.running and scheduler.pool.available == 60
    assert scheduler.max_step_seconds < math.inf


def test_batches_leave_live_prompts_their_steps_and_take_short_ones_beside_them():
    scheduler = make(max_tokens=2048, max_step_seconds=0.2)
    add(scheduler, "batch", 4000, 50, batch=True)
    alone = advance(scheduler, read)
    assert sum(chunk.tokens for chunk in alone) == 2048, "no live request came yet"
    live = add(scheduler, "live", 300, 30, client="b")
    while live.reads_prompt:
        assert {chunk.sequence.id for chunk in advance(scheduler, read)} == {"live"}
    steps = [advance(scheduler, read) for _ in range(5)]
    assert all(chunks[0].sequence.id == "live" for chunks in steps)
    assert 1 <= max(chunk.tokens for chunks in steps for chunk in chunks) <= 16


def test_prompts_after_a_slow_first_step_are_not_computed_token_by_token():
    """The first step may pack weights, and no step has decoded alone yet."""
    scheduler = make(max_tokens=512, max_step_seconds=0.2)
    add(scheduler, "first", 4, 200)
    advance(scheduler, lambda _: 14.0)
    others = [add(scheduler, i, 19, 200) for i in range(7)]
    steps = 0
    while any(other.reads_prompt for other in others):
        advance(scheduler, lambda chunks: 0.1 + 0.01 * sum(chunk.tokens for chunk in chunks))
        steps += 1
    assert steps <= 24, "133 tokens, about seven in a step"


def test_streams_of_a_lost_engine_are_computed_again_without_a_limit_of_seconds():
    scheduler = make(max_tokens=256, max_sequences=9, max_step_seconds=0.2)
    cost = lambda chunks: read(chunks, unit=0.01)
    streams = []
    for i in range(8):
        params = SamplingParams(max_tokens=400)
        stream = Sequence(i, [i] * 4, params, 0, 404, 0.0)
        for _ in range(96):
            stream.append(9)
        scheduler.add(stream)
        streams.append(stream)
    for _ in range(4):
        advance(scheduler, cost)
    assert all(stream.length > 100 for stream in streams), "800 tokens in four steps"
    prompt = add(scheduler, "new", 250, 2)
    assert max(cost(advance(scheduler, cost)) for _ in range(5)) < 0.25 and prompt.state is State.RUNNING
