"""Tenants of one engine: nobody takes over blocks, states or waiting of another, however a prompt is read."""

import numpy as np
import pytest

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.engine import Engine
from ckdist.engine.load_model import load_model
from ckdist.engine.sampling_params import SamplingParams
from tests.support.paged_executable import PagedExecutable, PlainSampler
from tests.support.paths import GOLDEN
from tests.unit.test_engine import finish, greedy

PROMPT = list(np.random.default_rng(7).integers(0, 50, 100))


def computed(executable: PagedExecutable) -> int:
    """Tokens of all steps so far."""
    return sum(tokens for step in executable.batches for tokens, _ in step)


@pytest.mark.parametrize("slots", [0, 20])
def test_a_tenant_finds_its_own_blocks_and_no_others(slots):
    executable = PagedExecutable(state_slots=slots)
    engine, cached, tokens = Engine(executable, PlainSampler()), [], []
    for tenant in (b"a", b"b", b"", b"a", b"b", b"", b"ab"):
        before = computed(executable)
        engine.add("x", PROMPT, greedy(1), tenant)
        cached.append(finish(engine)["x"][1].cached_tokens)
        tokens.append(computed(executable) - before)
    assert cached == [0, 0, 0, 96, 96, 96, 0]
    assert tokens == [100, 100, 100, 4, 4, 4, 100]


@pytest.mark.parametrize("slots", [0, 20])
def test_guesses_of_another_tenant_tell_nothing(slots):
    """The oracle: a right guess of the next block is counted as cached, a wrong one is not."""
    executable = PagedExecutable(state_slots=slots)
    engine, seen = Engine(executable, PlainSampler()), set()
    engine.add("victim", PROMPT, greedy(5), b"victim")
    finish(engine)
    for salt, guess in enumerate((PROMPT[:17], [*PROMPT[:16], 49 - PROMPT[16]], PROMPT[:50], [1] * 50)):
        before = computed(executable)
        engine.add("guess", guess, greedy(1), b"attacker, salt %d" % salt)
        cached = finish(engine)["guess"][1].cached_tokens
        seen.add((cached, computed(executable) - before - len(guess)))
    assert seen == {(0, 0)}


@pytest.mark.parametrize("slots", [0, 20])
def test_nobody_waits_for_a_prompt_of_another_tenant(slots):
    """Prompts alike wait for the first one if they are one tenant's: else they are computed beside it."""
    executable = PagedExecutable(max_tokens=256, num_blocks=128, state_slots=slots)
    engine = Engine(executable, PlainSampler())
    for number, tenant in enumerate((b"a", b"b", b"a", None, None)):
        engine.add(number, PROMPT, greedy(2), tenant)
    done = finish(engine)
    assert [done[number][1].cached_tokens for number in range(5)] == [0, 0, 96, 0, 0]


@pytest.mark.parametrize("slots", [0, 20])
def test_a_request_without_reuse_reads_nothing_and_leaves_nothing(slots):
    executable = PagedExecutable(state_slots=slots)
    engine, cached = Engine(executable, PlainSampler()), []
    for tenant in (None, b"", None, b""):
        engine.add("x", PROMPT, greedy(40), tenant)
        cached.append(finish(engine)["x"][1].cached_tokens)
        if tenant is None:
            assert engine.pool.cached == (0 if len(cached) == 1 else 8)
    assert cached == [0, 0, 0, 96]
    assert engine.pool.available == executable.num_blocks


def test_vectors_are_made_of_the_tenants_own_blocks():
    engine, cached = Engine(PagedExecutable(), PlainSampler()), []
    for tenant in (b"a", b"b", b"a", None):
        engine.embed("x", PROMPT, "last", 0, tenant)
        cached.append(finish(engine)["x"][1].cached_tokens)
    assert cached == [0, 0, 96, 0]


@pytest.mark.parametrize("slots", [0, 12])
def test_a_preempted_request_is_computed_again_without_another_tenants_blocks(slots):
    """Ten requests of two tenants and of none, with one prompt, fight for blocks of a few."""
    executable = PagedExecutable(num_blocks=24, state_slots=slots)
    engine = Engine(executable, PlainSampler())
    owner, tenants = np.full(executable.num_blocks, -1), [b"a", b"b", None]
    for number in range(9):
        engine.add(number, PROMPT[: 40 + number], greedy(60), tenants[number % 3])
    while engine.has_work:
        engine.step()
        owner[:] = -1
        for sequence in engine.scheduler.running:
            own = 10 + sequence.id if sequence.tenant is None else tenants.index(sequence.tenant)
            for block in sequence.block_table[: sequence.num_blocks]:
                assert owner[block] in (-1, own), "two tenants hold one block"
                owner[block] = own
    assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize("model", ["qwen35", "qwen3next"])
def test_hybrid_models_keep_tenants_apart(model):
    config = EngineConfig(model=str(GOLDEN / model), threads=2, ctx_size=160, parallel=4)
    loaded = load_model(config, SingleWorld())
    try:
        engine, cached = Engine(loaded.executable, PlainSampler()), []
        for tenant in (b"a", b"b", b"a", b"b", None):
            engine.add("x", list(range(3, 103)), SamplingParams(max_tokens=2, temperature=0.0), tenant)
            cached.append(finish(engine)["x"][1].cached_tokens)
        assert cached == [0, 0, 96, 96, 0]
    finally:
        loaded.close()
