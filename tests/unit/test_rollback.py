"""Rolling back: whatever is accepted and rolled back in between, a sequence goes on as if it never had those tokens."""

import random
from collections import deque

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckdist.engine.batch_builder import BatchBuilder
from ckdist.engine.block_pool import BlockPool
from ckdist.engine.constraint import TOO_SLOW
from ckdist.engine.engine import Engine
from ckdist.engine.grammars import Grammars
from ckdist.engine.load_model import BUNDLED
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.scheduler import Scheduler
from ckdist.engine.sequence import Sequence, State
from ckdist.engine.state_pool import StatePool
from ckdist.errors import ConfigError, EngineError, RequestError
from ckdist.program.step_batch import BLOCK_TOKENS
from ckdist.tokens.tokenizer_source import tokenizer_of
from tests.support.paged_executable import PagedExecutable, PlainSampler, alone, prefix_logits
from tests.unit.test_engine import finish, greedy
from tests.unit.test_engine_sampling import STATEFUL

TENANTS = b"", b"", b"other", None
LONGEST_REPLAY = 32  # tokens that are computed again after a rollback, at most


class Drafting:
    """Sequences with drafts, some of them wrong, over a paged cache. Checks every step and rolls back at random."""

    def __init__(self, draw: random.Random, num_blocks: int, slots: int, in_flight: int, max_rollback: int) -> None:
        self.draw = draw
        self.executable = PagedExecutable(num_blocks, draw.randint(20, 60), 4, 50, 110, slots, in_flight)
        self.pool = BlockPool(num_blocks, StatePool(slots) if slots else None)
        self.scheduler = Scheduler(
            self.pool, self.executable.max_tokens, 4, self.executable.max_tokens, 30, True, self.executable.costs
        )
        self.builder = BatchBuilder(self.scheduler, 110)
        self.under_way: deque = deque()
        self.sequences, self.texts, self.drafted = [], [], []
        prefix = [draw.randrange(50) for _ in range(40)]
        prompts = [prefix[: draw.randrange(41)] + [draw.randrange(50)] * draw.randint(1, 9) for _ in range(3)]
        whole = [prompt + alone(prompt, greedy(100 - len(prompt))) for prompt in prompts]
        for id in range(6):
            which = draw.randrange(3)
            prompt = prompts[which]
            count = draw.randint(1, 100 - len(prompt))
            self.texts.append(whole[which][: len(prompt) + count])
            reach = draw.choice([0, max_rollback])
            tenant, params = draw.choice(TENANTS), greedy(count)
            self.sequences.append(Sequence(id, prompt, params, 0, 110, 0.0, tenant=tenant, max_rollback=reach))
            self.scheduler.add(self.sequences[-1])
            self.drafted.append(0)

    def run(self) -> None:
        while self.scheduler.waiting or self.scheduler.running:
            while len(self.under_way) < self.executable.in_flight and self.issue():
                pass
            self.collect()
            self.roll_back(self.draw.choice(self.sequences))
        assert self.pool.available == self.pool.num_blocks
        assert self.pool.states is None or self.pool.states.available == self.pool.states.num_slots

    def issue(self) -> bool:
        step = self.scheduler.schedule()
        if step is None:
            return False
        batch = self.builder.build(step)
        for chunk in step.chunks:
            written = chunk.sequence.block_table[chunk.first // BLOCK_TOKENS : chunk.sequence.num_blocks]
            assert all(self.pool._keys[block] is None for block in written), "a known block is written"
        self.executable.publish(batch)
        self.scheduler.commit(step)
        for chunk in step.chunks:
            chunk.sequence.in_flight += 1
        self.under_way.append(step)
        for (_, tokens), block in self.pool._shared.items():
            assert self.executable.cache[block].tobytes() == tokens, "a block is known under other tokens"
        return True

    def collect(self) -> None:
        step, logits = self.under_way.popleft(), self.executable.collect()
        for chunk in step.chunks:
            chunk.sequence.in_flight -= 1
        for chunk in step.chunks:
            if chunk.samples:
                sequence = chunk.sequence
                expected = prefix_logits(sequence.tokens[: sequence.length], 50)
                assert logits[chunk.row].tobytes() == expected.tobytes()
                self.accept(sequence)

    def accept(self, sequence: Sequence) -> None:
        """Keeps the right drafts, adds the token that follows them and drafts again."""
        text, drafted = self.texts[sequence.id], self.drafted[sequence.id]
        accepted = sequence.length - drafted
        while drafted and accepted < sequence.length and sequence.tokens[accepted] == text[accepted]:
            accepted += 1
        self.scheduler.rollback(sequence, sequence.length - accepted)
        replayed = sequence.length - sequence.computed
        assert sequence.state is State.WAITING or replayed <= LONGEST_REPLAY
        if sequence.length == len(text):
            self.scheduler.remove(sequence)
            return
        sequence.append(text[sequence.length])
        left = min(sequence.max_rollback, len(text) - sequence.length)
        drafts = self.draw.choice([0, self.draw.randint(0, left)])
        wrong = self.draw.choice([drafts, self.draw.randint(0, drafts)])
        for i in range(drafts):
            sequence.append((text[sequence.length] + (i >= wrong)) % 50)
        self.drafted[sequence.id] = drafts

    def roll_back(self, sequence: Sequence) -> None:
        most = sequence.length - 1 - sequence.settled
        if sequence.state is State.FINISHED or sequence.in_flight or not sequence.max_rollback:
            return
        count = self.draw.randint(0, min(sequence.max_rollback, most))
        self.scheduler.rollback(sequence, count)
        self.drafted[sequence.id] = max(0, self.drafted[sequence.id] - count)
        assert sequence.state is State.WAITING or sequence.num_blocks <= sequence.blocks


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.integers(8, 30), st.booleans(), st.integers(1, 2), st.integers(1, 16))
def test_any_interleaving_of_drafts_and_rollbacks_gives_the_logits_of_a_fresh_run(
    seed, num_blocks, has_states, in_flight, max_rollback
):
    draw = random.Random(seed)
    Drafting(draw, num_blocks, draw.randint(4, 16) if has_states else 0, in_flight, max_rollback).run()


def rolled_back(engine: Engine, counts: dict[int, int], *sequences: Sequence) -> None:
    """Steps to the end, and rolls each sequence back once by `counts[number of output tokens]`."""
    done = set()
    while engine.has_work:
        engine.step()
        for sequence in sequences:
            made = len(sequence.output)
            if sequence.state is not State.FINISHED and made in counts and (sequence.id, made) not in done:
                done.add((sequence.id, made))
                engine.scheduler.rollback(sequence, counts[made])
    assert len(done) == len(counts) * len(sequences)


@pytest.mark.parametrize("fields", STATEFUL)
@pytest.mark.parametrize("num_blocks", [64, 7])
def test_samplers_with_a_history_draw_the_same_tokens_again(fields, num_blocks):
    """Penalties, DRY, XTC, mirostat and `min_tokens` of three sequences, some of which are preempted."""
    params = SamplingParams(max_tokens=40, seed=5, **{**fields, "stop_token_ids": ()})
    texts = []
    for max_rollback, counts in (0, {}), (16, {7: 7, 12: 12, 20: 3, 30: 16}):
        engine = Engine(PagedExecutable(num_blocks), Sampler(50), max_rollback=max_rollback)
        for id in range(3):
            engine.add(id, [1 + id, 2, 3], params)
        sequences = [engine._sequences[id] for id in range(3)]
        rolled_back(engine, counts, *sequences)
        texts.append([sequence.output.tolist() for sequence in sequences])
    assert texts[0] == texts[1] and [len(text) for text in texts[0]] == [40] * 3


def test_min_tokens_holds_again_after_a_rollback():
    class Eager(PagedExecutable):
        def run(self, batch):
            logits = super().run(batch)
            logits[:, 7] = 30.0
            return logits

    engine = Engine(Eager(), Sampler(50), {7}, max_rollback=16)
    engine.add(0, [1, 2], greedy(20, min_tokens=5))
    sequence = engine._sequences[0]
    while len(sequence.output) < 5:
        engine.step()
    engine.scheduler.rollback(sequence, 3)
    finish(engine)
    assert len(sequence.output) == 5


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(BUNDLED)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    made = Grammars(tokenizer, tokenizer.vocab_size)
    made.prepare()
    return made


@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_grammar_is_followed_again_from_every_token(tokenizer, grammars, logprobs):
    """Its forced tokens come in one step, or one by one with log probabilities."""
    grammar = '%llguidance {}\nstart: "The answer to everything is " /[a-z]{110}/ ", or perhaps " /[0-9 ]{9}/ "."'
    params = SamplingParams(max_tokens=90, seed=3, grammar=grammar, logprobs=logprobs)
    vocab = tokenizer.vocab_size
    seen: dict[int, set[tuple[tuple[int, ...], bytes]]] = {}  # by output tokens: forced tokens and mask

    def run(counts):
        engine = Engine(
            PagedExecutable(vocab_size=vocab), Sampler(vocab), tokenizer.eos_token_ids, grammars=grammars,
            max_rollback=16,
        )  # fmt: skip
        engine.add(0, [5], params)
        sequence = engine._sequences[0]
        constraint = sequence.sampling_state.constraint

        def look():
            constraint.fill(None)
            seen.setdefault(len(sequence.output), set()).add((tuple(constraint.forced), constraint.allowed.tobytes()))

        while engine.has_work:
            engine.step()
            if sequence.state is State.FINISHED:
                break
            look()
            for made in [made for made in counts if made <= len(sequence.output)][:1]:
                engine.scheduler.rollback(sequence, min(counts.pop(made), sequence.length - 1 - sequence.settled))
                look()
        return sequence.output.tolist()

    text = run({})
    assert tokenizer.decode(text).endswith(".") and len(text) > 40
    for count in range(1, 17):
        assert run(dict.fromkeys(range(1, len(text), 3), count)) == text
    assert all(len(found) == 1 for found in seen.values())


def test_a_matcher_that_an_abandoned_thread_holds_is_not_rolled_back(tokenizer, grammars, monkeypatch):
    vocab = tokenizer.vocab_size
    engine = Engine(PagedExecutable(vocab_size=vocab), Sampler(vocab), grammars=grammars, max_rollback=16)
    engine.add(0, [5], SamplingParams(max_tokens=30, grammar="%llguidance {}\nstart: /[a-z]{200}/"))
    sequence = engine._sequences[0]
    while len(sequence.output) < 9:
        engine.step()
    constraint = sequence.sampling_state.constraint
    constraint.compiled.is_stuck = True
    monkeypatch.setattr(constraint, "_matcher", object())  # a use of it fails
    engine.scheduler.rollback(sequence, 4)
    assert finish(engine)[0][1].error == TOO_SLOW


@pytest.mark.parametrize("slots", [0, 20])
def test_a_block_is_shared_when_no_rollback_can_reach_it_any_more(slots):
    """Other sequences take over the blocks of a prompt and an answer as far as these are settled, and keep them."""
    engine = Engine(PagedExecutable(state_slots=slots), PlainSampler(), max_rollback=12)
    prompt, params = list(range(20)), greedy(60)
    text = [*prompt, *alone(prompt, params)]
    engine.add("first", prompt, params)
    first, others = engine._sequences["first"], []
    for length, shared in (44, 1), (46, 2), (61, 2), (62, 3), (77, 3), (78, 4):
        while first.length < length:
            engine.step()
        assert first.shared_blocks == shared
        engine.add(length, [*text[: shared * 16], length % 50, 1], greedy(40))
        others.append(engine._sequences[length])
        engine.step()
        assert others[-1].cached_tokens == shared * 16
        engine.scheduler.rollback(first, min(12, first.length - 1 - first.settled))
    finish(engine)
    assert first.tokens.tolist() == text
    assert all(other.output.tolist() == alone(other.prompt.tolist(), greedy(40)) for other in others)
    engine.add("third", [*text, 1], greedy(1))
    assert finish(engine)["third"][1].cached_tokens == 64  # the last token of 80 was never computed


def test_a_preempted_sequence_takes_over_no_block_that_a_rollback_can_reach():
    engine = Engine(PagedExecutable(), PlainSampler(), max_rollback=16)
    for id in "ahead", "behind":
        engine.add(id, list(range(20)), greedy(100))
        while engine._sequences[id].length < 60:
            engine.step()
    ahead, behind = engine._sequences["ahead"], engine._sequences["behind"]
    assert ahead.shared_blocks > 3
    engine.scheduler._preempt(behind)
    engine.step()
    assert behind.state is State.RUNNING and behind.shared_blocks == 2
    engine.scheduler.rollback(behind, 16)
    finish(engine)
    assert behind.output.tolist() == ahead.output.tolist() == alone(range(20), greedy(100))


def test_a_rollback_is_refused_beyond_its_limits_and_under_way():
    executable = PagedExecutable(in_flight=2)
    engine = Engine(executable, PlainSampler(), max_rollback=16)
    engine.add(0, [1] * 30, greedy(60))
    sequence = engine._sequences[0]
    engine.step()
    with pytest.raises(EngineError, match="2 tokens cannot be rolled back; this sequence allows 0 to 1"):
        engine.scheduler.rollback(sequence, 2)
    for _ in range(20):
        engine.step()
    for count in 17, -1:
        with pytest.raises(EngineError, match=f"{count} tokens cannot be rolled back; this sequence allows 0 to 16"):
            engine.scheduler.rollback(sequence, count)
    engine.scheduler.rollback(sequence, 10)
    with pytest.raises(EngineError, match="7 tokens cannot be rolled back; this sequence allows 0 to 6"):
        engine.scheduler.rollback(sequence, 7)
    engine._issue()
    with pytest.raises(EngineError, match="1 tokens cannot be rolled back while a step of the sequence is under way"):
        engine.scheduler.rollback(sequence, 1)
    engine = Engine(PagedExecutable(), PlainSampler())
    engine.add(0, [1], greedy(3))
    engine.step()
    with pytest.raises(EngineError, match="1 tokens cannot be rolled back; this sequence allows 0 to 0"):
        engine.scheduler.rollback(engine._sequences[0], 1)


def test_too_few_slots_for_states_and_too_long_rollbacks_are_refused_at_once():
    with pytest.raises(ConfigError, match="max_rollback is 17; it must be from 0 to 16"):
        Engine(PagedExecutable(), PlainSampler(), max_rollback=17)
    engine = Engine(PagedExecutable(state_slots=3), PlainSampler(), max_rollback=16)
    with pytest.raises(RequestError, match="rolling back 16 tokens needs 4 slots of states, and there are 3; raise"):
        engine.add(0, [1], greedy(3))
    Engine(PagedExecutable(state_slots=3), PlainSampler(), max_rollback=15).add(0, [1], greedy(3))
