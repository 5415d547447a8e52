"""How prefill is cut: measured once, kept, taken again; files that make no sense; thresholds that noise does not move."""

import dataclasses
import json
import os
import pathlib
import stat
import sys

import pytest

from ckdist.config import EngineConfig
from ckdist.engine import launch, layer_costs, prefill
from ckdist.engine.layer_costs import LayerCosts, load_costs, path_of, save_costs
from ckdist.engine.launch import load_model
from ckdist.program.executable import DECODE, PREFILL
from tests.launcher import run_ranks
from tests.thread_ranks import run_threads

LLAMA = pathlib.Path(__file__).parent / "golden" / "llama3"
KEY = {"host": "here", "places": [[1, [0]], [1, [1]]], "types": [8, 8]}


def costs(*ratios: float, sizes=(8, 16, 32, 64), rounds: int = 5) -> LayerCosts:
    seconds = [1e-4 * size for size in sizes]
    return LayerCosts(sizes, (tuple(seconds), tuple(s * r for s, r in zip(seconds, ratios))), ((4,) * len(sizes), (3,) * len(sizes)), ratios, rounds)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_second_start_measures_nothing(own_cache, monkeypatch):
    calls = []
    real = prefill.measure
    monkeypatch.setattr(prefill, "measure", lambda executable: calls.append(1) or real(executable))

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


@pytest.mark.parametrize("text", ["", "garbage", "[]", "{}", '{"key": 1, "costs": {}}', "[" * 100000, "\udcff", "nan", "infinite", "short", "unsorted", "foreign", "text", "many"])
def test_files_that_make_no_sense_are_passed_over(own_cache, text):
    assert save_costs(KEY, costs(1.0, 0.9, 0.9, 0.9)) == path_of(KEY)
    assert load_costs(KEY) == costs(1.0, 0.9, 0.9, 0.9)
    data = json.loads(path_of(KEY).read_text())
    match text:
        case "nan" | "infinite":
            data["costs"]["ratios"][1] = float(text[:3])
        case "short":
            data["costs"]["seconds"][0].pop()
        case "unsorted":
            data["costs"]["sizes"][0] = 99
        case "foreign":
            data["key"]["host"] = "there"
        case "text":
            data["costs"]["moved"][1][0] = "3"
        case "many":
            data["costs"]["sizes"] = list(range(1, 1000))
    written = json.dumps(data) if text in ("nan", "infinite", "short", "unsorted", "foreign", "text", "many") else text
    path_of(KEY).write_bytes(written.encode(errors="surrogateescape"))
    assert load_costs(KEY) is None


def test_what_cannot_be_kept_is_no_error(own_cache, monkeypatch):
    assert save_costs(KEY, costs(0.9, 0.9, 0.9, 0.9, rounds=2)) is None  # too few to be trusted
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
    assert "a layer of 64 tokens takes" in choice.reason and f"{ratios[1]:.3f} at 16" in choice.reason and choice.reason.count("\n") == 0


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
    found = layer_costs.measure(Slow())
    assert found == LayerCosts((64,), ((1.0,), (2.0,)), ((7,), (7,)), (2.0,), 1)
    assert [size for size, _ in Slow.runs] == [8, 8, 64, 64]
    assert save_costs(KEY, found) is None


def test_the_choice_is_seen(own_cache):
    done = run_ranks(2, "-m", "ckdist.cli.main", "bench", "-m", str(LLAMA), "-t", "1", "-p", "48", "-n", "2", "-r", "1", "-c", "96", "--tune", "-v", "-o", "json", timeout=60)
    assert done.returncode == 0, done.stderr
    prompt, generated = json.loads(done.stdout)
    found, reason = prompt["layout_choice"]["costs"], prompt["layout_choice"]["reason"]
    assert found["sizes"] == [12, 24, 48, 96] and reason in done.stderr and "measured now, and kept" in reason
    assert prompt["layers_predicted_ns"] > 0 == generated["layers_predicted_ns"]
    assert len(list((own_cache / "ckdist" / "prefill").iterdir())) == 1
