"""What is read again soon lies in the cache: rates of reading, by the bytes from one use of a byte to the next."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckdist.planning.expert_placement import experts_hit
from ckdist.planning.machine_spec import machine_of, tomllib
from ckdist.planning.reuse import BytesRead, read_rates
from ckdist.planning.step_shape import StepShape
from tests.unit.test_predict import DENSE, MACHINE, MIXTURE, predictor

CURVE = ((5e6, 300e9), (50e6, 200e9), (500e6, 120e9))
CACHED = dataclasses.replace(MACHINE, reuse=CURVE)  # whose memory gives 80 GB/s
DECODE = StepShape.decode(1, 0)


def test_rates_lie_between_what_was_measured_and_those_of_memory():
    rates = [CACHED.read_rate(8, 1, size) for size in (1e3, 5e6, 20e6, 50e6, 2e8, 5e8, 6e8, 1e12)]
    assert rates == sorted(rates, reverse=True)
    assert rates[:2] == pytest.approx([300e9] * 2) and rates[3] == pytest.approx(200e9)
    assert rates[-2:] == [CACHED.read_rate(8)] * 2 == [80e9] * 2
    assert CACHED.read_rate(8, 2, 25e6) == pytest.approx(100e9)  # two ranks, that share cache and rate
    assert CACHED.read_rate(2, 1, 50e6) == pytest.approx(50e9)  # a core's part of what all of them reach


def misses_of_steps(size: float, room: float) -> float:
    """Of a cache that gives up what chance has, the part of the bytes that steps of the same ones find gone."""
    missed = 1.0
    for _ in range(500):
        missed = 1 - math.exp(-size * missed / room)
    return missed


@pytest.mark.parametrize("always", [0, 20])
def test_experts_come_again_as_in_a_cache_that_gives_up_at_random(always):
    """Against a simulated one: of experts, and of what each step reads beside them."""
    rng, experts, used, room, steps = np.random.default_rng(0), 64, 4, 40, 6000
    kept, found = np.full(room, -1), {True: 0, False: 0}  # what lies where
    for _ in range(steps):
        chosen = [*rng.choice(experts, used, replace=False), *range(experts, experts + always)]
        for each in chosen:
            here = bool((kept == each).any())
            found[each < experts] += here
            if not here:
                kept[rng.integers(room)] = each
    near, far = 1e9, 1e6
    rate = lambda between: 1 / (1 / near + misses_of_steps(between, room * 1e6) * (1 / far - 1 / near))
    part = used / experts
    rates = read_rates(BytesRead(always * 1e6, {part: experts * 1e6}), experts_hit, rate, 1e10)
    hits = lambda of: 1 - (1 / of - 1 / near) / (1 / far - 1 / near)
    assert hits(rates.of(part)) == pytest.approx(found[True] / (steps * used), abs=0.04)
    if always:
        assert hits(rates.always) == pytest.approx(found[False] / (steps * always), abs=0.04)


@settings(max_examples=40, deadline=None)
@given(
    used=st.floats(0.01, 1.0), rows=st.integers(1, 16), shared_choices=st.floats(0.0, 1.0), size=st.floats(1e6, 1e10)
)
def test_more_bytes_are_never_read_faster(used, rows, shared_choices, size):
    rate = lambda between: CACHED.read_rate(8, 1, between)
    hit = lambda part, steps: experts_hit(part, steps * rows, shared_choices)
    of = lambda always, stack: read_rates(BytesRead(always, {used: stack}), hit, rate, CURVE[-1][0])
    small, dense, stack = of(size, size), of(2 * size, size), of(size, 2 * size)
    for more in (dense, stack):
        assert more.always <= small.always and more.of(used) <= small.of(used) * (1 + 1e-9)
    assert 80e9 * (1 - 1e-9) <= small.of(used) <= small.always * (1 + 1e-9)


@pytest.mark.parametrize("config", [DENSE, MIXTURE])
def test_a_model_that_stays_in_the_cache_is_faster(config):
    config = {**config, "tie_word_embeddings": True}  # else a step reads one row of a table
    quick = {"int8": 1e14, "bf16": 1e14}  # so that memory decides
    plain, cached = (dataclasses.replace(machine, **quick) for machine in (MACHINE, CACHED))
    one, other = predictor(config, machine=plain), predictor(config, machine=cached)
    read = one.stages[0].costs[0].bytes_read(DECODE)
    assert read.always + sum(read.stacks.values()) == pytest.approx(one.memory(16, 1)[0].weights, rel=0.1)
    assert bool(read.stacks) == ("num_experts" in config)
    assert other.decode(1, 0).tokens > 1.1 * one.decode(1, 0).tokens
    tiny = predictor(config, machine=dataclasses.replace(plain, reuse=((1e3, 300e9),)))
    assert tiny.decode(1, 0).tokens == one.decode(1, 0).tokens


def test_a_machine_file_has_the_curve():
    found = machine_of(tomllib.loads(CACHED.toml()), "file.toml")
    assert found.reuse == CURVE and found == CACHED
    assert "reuse" not in MACHINE.toml()
