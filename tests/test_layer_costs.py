"""How prefill is cut: measured once, kept, taken again; files that make no sense; thresholds that noise does not move."""

import dataclasses
import json
import math
import os
import pathlib
import random
import shutil
import stat
import sys

import pytest

from ckdist.config import EngineConfig
from ckdist.engine import layer_costs, prefill
from ckdist.engine.launch import load_model
from ckdist.engine.layer_costs import LayerCosts, load_costs, path_of, save_costs
from ckdist.program.executable import DECODE, PREFILL
from tests.launcher import run_ranks
from tests.thread_ranks import run_threads

LLAMA = pathlib.Path(__file__).parent / "golden" / "llama3"
KEY = {"host": "here", "places": [[1, [0]], [1, [1]]], "types": [8, 8]}


def costs(*ratios: float, sizes=(8, 16, 32, 64), rounds: int = 5, spread: float = 0.0) -> LayerCosts:
    seconds = [1e-4 * size for size in sizes]
    within = tuple((r - spread, r, r + spread) for r in ratios)
    return LayerCosts(sizes, (tuple(seconds), tuple(s * r for s, r in zip(seconds, ratios))), ((4,) * len(sizes), (3,) * len(sizes)), within, rounds)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_second_start_measures_nothing(own_cache, monkeypatch):
    calls = []
    real = prefill.measure

    def counted(executable):
        """As on a quiet machine."""
        calls.append(1)
        found = real(executable)
        return dataclasses.replace(found, ratios=((0.9, 0.9, 0.9),) * len(found.sizes), rounds=5)

    monkeypatch.setattr(prefill, "measure", counted)

    def rank(world, measure=False, **more):
        model = load_model(EngineConfig(model=str(LLAMA), threads=1, ctx_size=96, **more), world, measure=measure)
        model.executable.close()
        return model.prefill, model.executable.prefill_from

    first = run_threads(2, rank)
    assert len(calls) == 1 and first[0] == first[1] and "measured now, and kept" in first[0][0].reason
    again = run_threads(2, rank)
    assert len(calls) == 1 and again[0] == again[1] and "measured before, from the cache" in again[0][0].reason
    assert again[0][0].costs == first[0][0].costs and again[0][1] == first[0][1] == first[0][0].from_tokens
    run_threads(2, lambda world: rank(world, measure=True))
    run_threads(3, rank)  # other ranks, other costs
    run_threads(2, lambda world: rank(world, cache_type_k="f32", cache_type_v="f32"))
    assert len(calls) == 4
    run_threads(2, lambda world: rank(world, prefill="token"))
    run_threads(2, lambda world: rank(world, prefill="tensor"))
    assert len(calls) == 4


@pytest.mark.parametrize("text", ["", "garbage", "[]", "{}", '{"key": 1, "costs": {}}', "[" * 100000, "\udcff", "nan", "infinite", "short", "turned", "single", "unsorted", "foreign", "text", "many"])
def test_files_that_make_no_sense_are_passed_over(own_cache, text):
    assert save_costs(KEY, costs(1.0, 0.9, 0.9, 0.9)) == path_of(KEY)
    assert load_costs(KEY) == costs(1.0, 0.9, 0.9, 0.9)
    data = json.loads(path_of(KEY).read_text())
    match text:
        case "nan" | "infinite":
            data["costs"]["ratios"][1][2] = float(text[:3])
        case "short":
            data["costs"]["seconds"][0].pop()
        case "turned":
            data["costs"]["ratios"][0].reverse()
            data["costs"]["ratios"][0][0] += 0.1
        case "single":
            data["costs"]["ratios"][0] = 0.9
        case "unsorted":
            data["costs"]["sizes"][0] = 99
        case "foreign":
            data["key"]["host"] = "there"
        case "text":
            data["costs"]["moved"][1][0] = "3"
        case "many":
            data["costs"]["sizes"] = list(range(1, 1000))
    written = json.dumps(data) if text in ("nan", "infinite", "short", "turned", "single", "unsorted", "foreign", "text", "many") else text
    path_of(KEY).write_bytes(written.encode(errors="surrogateescape"))
    assert load_costs(KEY) is None


def test_what_cannot_be_kept_is_no_error(own_cache, monkeypatch):
    assert save_costs(KEY, costs(0.9, 0.9, 0.9, 0.9, rounds=4)) is None  # too few to be trusted
    assert save_costs(KEY, costs(0.9, 0.9, 0.9, 0.9, spread=0.1)) is None  # neither way surely won
    assert save_costs(KEY, costs(0.9, 1.2, 0.98, 1.02, spread=0.02)) is not None  # the last two may go either way, for little
    shutil.rmtree(own_cache / "ckdist")
    (own_cache / "ckdist").write_text("a file where a folder should be")
    assert save_costs(KEY, costs(0.9, 0.9, 0.9, 0.9)) is None and load_costs(KEY) is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(pathlib.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory.")))
    assert save_costs(KEY, costs(0.9, 0.9, 0.9, 0.9)) is None and load_costs(KEY) is None


def test_the_oldest_files_go(own_cache, monkeypatch):
    monkeypatch.setattr(layer_costs, "KEPT_FILES", 3)
    paths = []
    for i in range(5):
        paths.append(save_costs({"number": i}, costs(0.9, 0.9, 0.9, 0.9)))
        os.utime(paths[-1], (i, i))
    assert [path.exists() for path in paths] == [False, False, True, True, True]
    assert all(stat.S_ISREG(path.stat().st_mode) and path.suffix == ".json" for path in (own_cache / "ckdist" / "prefill").iterdir())


@pytest.mark.parametrize(
    "ratios, from_tokens",
    [
        ((1.2, 0.95, 0.9, 0.9), 16),
        ((1.2, 0.995, 0.9, 0.9), 32),  # neither is clear
        ((1.2, 0.9, 1.005, 0.9), 16),  # one in the band between two that are clear
        ((0.9, 0.9, 0.9, 1.005), 8),
        ((0.9, 0.9, 0.9, 1.02), sys.maxsize),
        ((0.9, 1.02, 0.98, 0.995), 32),
        ((0.995, 0.995, 1.005, 0.995), sys.maxsize),
    ],
)
def test_thresholds(ratios, from_tokens):
    choice = prefill._choose(costs(*ratios), "measured now")
    assert choice.from_tokens == from_tokens
    assert "a layer of 64 tokens takes" in choice.reason and f"{ratios[1]:.3f} ({ratios[1]:.2f} to {ratios[1]:.2f}) at 16" in choice.reason and choice.reason.count("\n") == 0


def test_a_size_that_is_not_sure_decides_nothing():
    assert prefill._choose(costs(0.9, 0.9, 0.9, 0.9, spread=0.1), "").from_tokens == sys.maxsize
    assert prefill._choose(costs(1.2, 1.2, 1.2, 1.02, spread=0.1), "").from_tokens == sys.maxsize
    assert prefill._choose(costs(1.2, 0.9, 1.05, 0.8, spread=0.06), "").from_tokens == 16


def test_predictions():
    found = costs(1.2, 0.95, 0.9, 0.9)
    assert found.predicted(DECODE, 24) == pytest.approx(24e-4) and found.predicted(PREFILL, 64) == pytest.approx(0.9 * 64e-4)
    assert found.predicted(DECODE, 640) == pytest.approx(640e-4) and found.predicted(DECODE, 1) == pytest.approx(8e-4)
    choice = prefill._choose(found, "")
    assert choice.predicted([(PREFILL, 64), (DECODE, 8)], 10) == pytest.approx(10 * (0.9 * 64e-4 + 8e-4))
    assert dataclasses.replace(choice, costs=None).predicted([(PREFILL, 64)], 10) is None


def test_time_is_bounded(monkeypatch):
    """A model whose layer takes longer than there is time for is asked about at its largest step, and not kept."""

    class Slow:
        max_tokens, context_length, num_blocks, vocab_size = 64, 64, 4, 100
        runs = []

        def times(self, reset=False):
            return type("Times", (), dict(total=1.0 + self.runs[-1][1] if self.runs else 0.0, moved=7))

        def run_layer(self, batch, phase):
            self.runs.append((len(batch.token_ids), phase))

    monkeypatch.setattr(layer_costs, "SECONDS", -1.0)
    monkeypatch.setattr(layer_costs, "MORE_SECONDS", -1.0)
    found = layer_costs.measure(Slow())
    assert found == LayerCosts((64,), ((1.0,), (2.0,)), ((7,), (7,)), ((2.0, 2.0, 2.0),), 1)
    assert [size for size, _ in Slow.runs] == [64, 64, 64, 64]
    assert save_costs(KEY, found) is None


@pytest.mark.parametrize("noise, kept", [(0.0, True), (0.02, True), (30.0, False)])
def test_noise_is_neither_believed_nor_kept(own_cache, noise, kept):
    """Cutting tokens takes 0.9 of the time; neighbours make every run longer by up to `noise` times that."""
    draws = random.Random(1)

    class Noisy:
        max_tokens, context_length, num_blocks, vocab_size = 64, 64, 4, 100
        took, runs = 0.0, 0

        def times(self, reset=False):
            return type("Times", (), dict(total=self.took, moved=7))

        def run_layer(self, batch, phase):
            self.runs += 1
            self.took = len(batch.token_ids) * (0.9 if phase == PREFILL else 1.0) * (1 + noise * draws.random())

    executable = Noisy()
    found = layer_costs.measure(executable)
    assert found.certain == kept == (save_costs(KEY, found) is not None)
    assert prefill._choose(found, "").from_tokens == 8 or not kept
    assert executable.runs == 2 + 2 * 5 * 4 if kept else 2 + 2 * 5 * 4 < executable.runs <= 2 + 2 * 100 * 4


def test_a_median_within_its_bounds():
    """Against the binomial distribution: the median lies within the bounds by 92 % at least from five values on, and bounds are not wider than needed."""
    for n in range(5, 101):
        low, middle, _ = layer_costs.median_within([float(i) for i in range(n)])
        outside = lambda left_out: 2 * sum(math.comb(n, i) for i in range(left_out + 1)) / 2**n
        assert middle == (n - 1) / 2 and outside(int(low)) <= 0.08 and outside(int(low) + 1) > 0.04, n


def test_the_choice_is_seen(own_cache):
    done = run_ranks(2, "-m", "ckdist.cli.main", "bench", "-m", str(LLAMA), "-t", "1", "-p", "48", "-n", "2", "-r", "1", "-c", "96", "--tune", "-v", "-o", "json", timeout=60)
    assert done.returncode == 0, done.stderr
    prompt, generated = json.loads(done.stdout)
    found, reason = prompt["layout_choice"]["costs"], prompt["layout_choice"]["reason"]
    assert found["sizes"] == [12, 24, 48, 96] and reason in done.stderr and "measured now" in reason
    assert prompt["layers_predicted_ns"] > 0 == generated["layers_predicted_ns"]
    assert (own_cache / "ckdist" / "prefill").is_dir() == ("and kept" in reason) == ("measures again" not in reason)
