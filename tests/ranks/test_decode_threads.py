"""The threads of decode: measured once, kept, used again; noise takes none away; --threads is obeyed."""

import math
import random
import types

import pytest

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine import step_choices, thread_measurement
from ckdist.engine.load_model import load_model
from ckdist.engine.thread_measurement import SECONDS, measure
from tests.support.paths import GOLDEN
from tests.support.thread_ranks import run_threads


class Simulated:
    """An executable whose first layer takes `seconds(threads)` by a clock of its own, with noise."""

    max_tokens, context_length, num_blocks, vocab_size, state_slots, threads = 512, 512, 32, 100, 0, 16

    def __init__(self, draws: random.Random, seconds, noise: float):
        self.draws, self.seconds, self.noise = draws, seconds, noise
        self.now = self.took = 0.0
        self.single_threads = self.threads

    def stats(self, reset=False):
        took = types.SimpleNamespace(total=self.took)
        self.took = 0.0 if reset else self.took
        return took

    def run_layer(self, batch, phase):
        took = self.seconds(self.single_threads) * math.exp(self.noise * self.draws.gauss(0, 1))
        self.took += took
        self.now += took


def chosen(seconds, noise: float, starts: int = 60) -> list[int]:
    draws, found = random.Random(1), []
    for _ in range(starts):
        executable = Simulated(draws, seconds, noise)
        rows = measure(executable, lambda executable=executable: executable.now)
        assert executable.now < SECONDS + 0.05
        found.append(([16] + [threads for threads, _, is_faster in rows if is_faster])[-1])
    return found


@pytest.mark.parametrize("noise", [0.02, 0.2])
def test_noise_takes_no_threads_away(noise):
    assert sum(threads < 16 for threads in chosen(lambda _: 3e-4, noise, 200)) <= 6  # of 200: 3 %


def test_fewer_threads_are_taken_as_long_as_they_are_faster():
    assert chosen(lambda threads: 2e-3 / threads + 4e-6 * threads, 0.05).count(16) >= 54  # best at 22
    assert chosen(lambda threads: 1e-4 + 2e-5 * abs(threads - 12), 0.05).count(12) >= 54
    assert chosen(lambda threads: 2e-5 * threads, 0.05).count(8) >= 54


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_start_measures_nothing_and_a_flag_is_obeyed(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(step_choices, "LEAST_THREADS", 1)
    calls = []
    monkeypatch.setattr(thread_measurement, "measure", lambda e: calls.append(measure(e)) or [(1, 0.8, True)])

    def rank(world, **more):
        model = load_model(EngineConfig(model=str(GOLDEN / "llama3"), ctx_size=96, **more), world)
        model.executable.close()
        return model.decode_threads, model.executable.single_threads, model.executable.threads

    def start(**more):
        return run_threads(ranks, lambda world: rank(world, **more))[0] if ranks > 1 else rank(SingleWorld(), **more)

    first, again = start(), start()
    assert first[1] == again[1] == 1 and len(calls) == 1 and calls[0][0][0] >= 0
    assert first[0] == f"decode: 1 of {first[2]} threads (measured: 20 % faster)"
    assert again[0] == f"decode: 1 of {first[2]} threads (measured before: 20 % faster)"
    assert start(threads=1)[:2] == ("", 1) and len(calls) == 1
