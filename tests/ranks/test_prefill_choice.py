"""The choice of prefill: measured once, kept, used again; hostile files; thresholds that noise does not move."""

import json
import math
import random
import sys
import types

import pytest

from ckdist.comm.user_cache import read_kept, write_kept
from ckdist.config.engine_config import EngineConfig
from ckdist.engine import prefill_measurement
from ckdist.engine.load_model import load_model
from ckdist.engine.prefill_measurement import measure
from ckdist.engine.start_measurement import sound
from ckdist.layouts.prefill_choice import by_chance, choose
from ckdist.layouts.rank_plan import Plan
from ckdist.program.executable import DECODE, PREFILL
from tests.support.launcher import run_ranks
from tests.support.paths import GOLDEN
from tests.support.thread_ranks import run_threads

LLAMA = GOLDEN / "llama3"


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_second_start_measures_nothing(own_cache, monkeypatch):
    calls = []
    monkeypatch.setattr(
        prefill_measurement,
        "measure",
        lambda _: calls.append(1) or [(96, 0.8, True), (48, 0.9, True), (24, 1.1, False)],
    )

    def rank(world, measure=False, **more):
        model = load_model(EngineConfig(model=str(LLAMA), threads=1, ctx_size=96, **more), world, measure=measure)
        model.executable.close()
        return model.prefill, model.executable.prefill_from

    first, again = run_threads(2, rank), run_threads(2, rank)
    assert len(calls) == 1 and first[0] == first[1] and again[0] == again[1] and first[0][1] == again[0][1] == 48
    assert first[0][0].reason == "token-parallel from 48 tokens (measured: 20 % faster at 96)"
    assert again[0][0].reason == "token-parallel from 48 tokens (measured before: 20 % faster at 96)"
    run_threads(2, lambda world: rank(world, measure=True))
    assert len(calls) == 2
    run_threads(2, lambda world: rank(world, cache_type_k="f32", cache_type_v="f32"))  # another key
    assert len(calls) == 3
    run_threads(2, lambda world: rank(world, prefill="token"))
    run_threads(2, lambda world: rank(world, prefill="tensor"))
    monkeypatch.setattr(Plan, "crowded", True)
    assert run_threads(2, rank)[0][0].reason == "tensor-parallel (threads share cores)"
    assert len(calls) == 3


@pytest.mark.parametrize(
    "text",
    ["", "garbage", "[]", "{}", "null", "3", "[" * 100000, "\udcff", '[["x", 1, true]]', "[[1, 2]]", "[[-1, 1, true]]",
     "[[1, NaN, true]]", "[[Infinity, 1, true]]", "[[1, 0, false]]"],
)  # fmt: skip
def test_invalid_files_are_ignored(own_cache, text):
    write_kept("prefill/one.json", [(64, 0.9, True)])
    assert sound(read_kept("prefill/one.json")) == [(64, 0.9, True)]
    (own_cache / "ckdist/prefill/one.json").write_bytes(text.encode(errors="surrogateescape"))
    assert sound(read_kept("prefill/one.json")) is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    write_kept("prefill/one.json", [1])
    assert read_kept("prefill/one.json") is None


@pytest.mark.parametrize(
    "rows, from_tokens, reason",
    [
        ([(64, 0.93, True), (32, 0.9, True), (16, 1.0, False)], 32, "token-parallel from 32 tokens (measured: 7 % f"),
        ([(64, 0.93, None)], sys.maxsize, "tensor-parallel (measured: 7 % faster token-parallel at 64, within the n"),
        ([(64, 1.2, False)], sys.maxsize, "tensor-parallel (measured: 20 % slower token-parallel at 64)"),
    ],
)
def test_thresholds(rows, from_tokens, reason):
    choice = choose(rows)
    assert choice.from_tokens == from_tokens and choice.reason.startswith(reason)


class Simulated:
    """An executable whose layers take `seconds` at 512 tokens tensor-parallel and `ratio(size)` of that token-parallel,
    by a clock of its own.

    Each run takes exp(noise * a normal number) times as long, and one in thirty 4 to 8 ms more, when the machine is
    taken away.
    """

    max_tokens, context_length, num_blocks, vocab_size, state_slots = 512, 512, 32, 100, 0

    def __init__(self, draws: random.Random, ratio, noise: float, seconds: float = 1e-3):
        self.draws, self.ratio, self.noise, self.seconds = draws, ratio, noise, seconds
        self.now = self.took = 0.0
        self.runs = []

    def stats(self, reset=False):
        return None if reset else types.SimpleNamespace(total=self.took)

    def run_layer(self, batch, phase):
        size = len(batch.token_ids)
        ratio = self.ratio(size) if phase == PREFILL else 1.0
        self.took = self.seconds * size / 512 * ratio * math.exp(self.noise * self.draws.gauss(0, 1))
        if self.noise and self.draws.random() < 1 / 30:
            self.took += self.draws.uniform(4e-3, 8e-3)
        self.now += self.took
        self.runs.append((size, phase))


def thresholds(starts: int, ratio, noise: float) -> list[int]:
    """The choices of several starts, one after the other."""
    draws, found = random.Random(1), []
    for _ in range(starts):
        executable = Simulated(draws, ratio, noise)
        found.append(choose(measure(executable, lambda: executable.now)).from_tokens)
        assert executable.now < prefill_measurement.SECONDS + 0.1
    return found


@pytest.mark.parametrize("noise", [0.02, 0.2, 0.5])
def test_noise_sets_no_threshold(noise):
    assert sum(found < sys.maxsize for found in thresholds(200, lambda size: 1.0, noise)) <= 6  # of 200: 3 %


@pytest.mark.parametrize("noise", [0.02, 0.2])
def test_a_gain_is_found_in_noise(noise):
    """Token-parallel takes 30 % less from 128 tokens on."""
    found = thresholds(60, lambda size: 0.7 if size >= 128 else 1.0, noise)
    assert sum(threshold in (64, 128, 256) for threshold in found) >= 54


def test_without_noise_few_pairs_decide():
    executable = Simulated(random.Random(1), lambda size: 0.9 if size > 100 else 1.2, 0.0)
    rows = measure(executable, lambda: executable.now)
    assert [(size, faster) for size, _, faster in rows] == [(512, True), (256, True), (128, True), (64, False)]
    assert len(executable.runs) == 2 + 2 * 12 * 4
    assert [phase for _, phase in executable.runs[2:6]] == [PREFILL, DECODE, DECODE, PREFILL]


def test_time_is_bounded():
    """A model whose layer takes longer than there is time for runs twice in each form, and is not sure."""
    executable = Simulated(random.Random(1), lambda size: 0.5, 0.0, seconds=10.0)
    assert measure(executable, lambda: executable.now) == [(512, 0.5, None)]
    assert executable.runs == [(512, phase) for phase in (DECODE, PREFILL, PREFILL, DECODE)]


def test_chances_are_those_of_coins():
    assert by_chance(7, 7) == 1 / 128 and by_chance(4, 2) == 11 / 16 and by_chance(5, 0) == 1


def test_the_choice_is_seen(own_cache):
    words = ["-m", "ckdist.cli.main", "bench", "-m", str(LLAMA), "-t", "1", "-p", "48", "-n", "2", "-r", "1"]
    done = run_ranks(2, *words, "--prefill", "auto", "-c", "96", "--tune", "-v", "-o", "json", timeout=60)
    assert done.returncode == 0, done.stderr
    prompt, _ = json.loads(done.stdout)
    found, reason = prompt["layout_choice"]["ratios"], prompt["layout_choice"]["reason"]
    assert found[0][0] == 96 and f"prefill: {reason}\n" in done.stderr and "measured: " in reason
