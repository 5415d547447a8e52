"""What prefill costs both ways: measured once, kept, used again; files that make no sense; thresholds that noise does
not move.
"""

import dataclasses
import json
import math
import os
import pathlib
import random
import shutil
import stat
import sys
import types

import pytest

from ckdist.config.engine_config import EngineConfig
from ckdist.engine.start_up import load_model
from ckdist.planning import measured_cost, prefill
from ckdist.planning.measured_cost import LayerCosts, load_costs, path_of, save_costs
from ckdist.planning.paired_test import FASTER, NO_FASTER, NOISY, UNSEEN, median_within, signed_rank
from ckdist.planning.rank_plan import Plan
from ckdist.program.executable import DECODE, PREFILL
from tests.support.launcher import run_ranks
from tests.support.paths import GOLDEN
from tests.support.thread_ranks import run_threads

LLAMA = GOLDEN / "llama3"
KEY = {"host": "here", "places": [[1, [0]], [1, [1]]], "types": [8, 8]}


def costs(*ratios: float, sizes=(8, 16, 32, 64), verdicts=None, spread: float = 0.0) -> LayerCosts:
    """Measured so, ascending; the verdicts are those of ratios without noise unless given."""
    seconds = [1e-4 * size for size in sizes]
    within = tuple((r - spread, r, r + spread) for r in ratios)
    verdicts = tuple(verdicts or (FASTER if r <= 0.97 else NO_FASTER for r in ratios))
    count = len(sizes)
    return LayerCosts(
        sizes,
        (tuple(seconds), tuple(s * r for s, r in zip(seconds, ratios, strict=True))),
        ((4,) * count, (3,) * count),
        within,
        (16,) * count,
        verdicts,
    )


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_second_start_measures_nothing(own_cache, monkeypatch):
    calls = []

    def quiet(executable, gains):
        calls.append(list(gains))
        return costs(*(0.9, 0.9, 0.9, 0.8)[-len(gains) :], sizes=tuple(sorted(gains)))

    monkeypatch.setattr(prefill, "measure", quiet)

    def rank(world, measure=False, **more):
        model = load_model(EngineConfig(model=str(LLAMA), threads=1, ctx_size=96, **more), world, measure=measure)
        model.executable.close()
        return model.prefill, model.executable.prefill_from

    gains = {96: 0.06, 48: 0.2, 24: 0.01, 12: -0.3}
    monkeypatch.setattr(prefill, "predicted_gains", lambda world, models, sizes: gains)
    untold = run_threads(2, rank)  # the largest step promises too little
    assert calls == [] and untold[0] == untold[1] and untold[0][1] == sys.maxsize and untold[0][0].costs is None
    assert (
        untold[0][0].reason == "tensor-parallel (predicted: token-parallel 6 % faster at 96, too little to measure)"
        and "30 % slower at 12" in untold[0][0].details
    )
    first = run_threads(2, lambda world: rank(world, measure=True))
    assert (
        calls == [[96, 48, 24, 12]]
        and first[0] == first[1]
        and first[0][0].reason == "token-parallel from 12 tokens (measured: 20 % faster at 96)"
    )
    again = run_threads(2, rank)
    assert (
        len(calls) == 1
        and again[0] == again[1]
        and again[0][0].reason == "token-parallel from 12 tokens (measured before: 20 % faster at 96)"
    )
    assert again[0][0].costs == first[0][0].costs and again[0][1] == first[0][1] == first[0][0].from_tokens == 12
    run_threads(2, lambda world: rank(world, measure=True))
    assert len(calls) == 2
    run_threads(3, rank)  # other ranks, other costs
    run_threads(2, lambda world: rank(world, cache_type_k="f32", cache_type_v="f32"))
    run_threads(2, lambda world: rank(world, prefill="token"))
    run_threads(2, lambda world: rank(world, prefill="tensor"))
    assert len(calls) == 2
    gains = {96: 0.2, 48: 0.1, 24: 0.01, 12: 0.3}
    monkeypatch.setattr(Plan, "crowded", True)
    assert run_threads(3, rank)[0][0].reason == "tensor-parallel (threads share cores)"
    assert len(calls) == 2
    monkeypatch.setattr(Plan, "crowded", False)
    run_threads(3, rank)
    assert calls[2:] == [[96, 48]]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        "[]",
        "{}",
        '{"key": 1, "costs": {}}',
        "[" * 100000,
        "\udcff",
        "nan",
        "infinite",
        "short",
        "reversed",
        "single",
        "unsorted",
        "foreign",
        "text",
        "many",
        "open",
    ],
)
def test_files_that_make_no_sense_are_passed_over(own_cache, text):
    assert save_costs(KEY, costs(1.0, 0.9, 0.9, 0.9)) == path_of(KEY)
    assert load_costs(KEY) == costs(1.0, 0.9, 0.9, 0.9)
    data = json.loads(path_of(KEY).read_text())
    match text:
        case "nan" | "infinite":
            data["costs"]["ratios"][1][2] = float(text[:3])
        case "short":
            data["costs"]["seconds"][0].pop()
        case "reversed":
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
        case "open":
            data["costs"]["verdicts"][0] = NOISY
    named = ("nan", "infinite", "short", "reversed", "single", "unsorted", "foreign", "text", "many", "open")
    written = json.dumps(data) if text in named else text
    path_of(KEY).write_bytes(written.encode(errors="surrogateescape"))
    assert load_costs(KEY) is None


def test_what_cannot_be_kept_is_no_error(own_cache, monkeypatch):
    assert (
        save_costs(KEY, costs(0.9, 0.9, 0.9, 0.9, verdicts=[NOISY, FASTER, FASTER, FASTER])) is None
    )  # another measurement may say more
    assert save_costs(KEY, costs(0.9, 0.9, 0.9, 0.9, verdicts=[UNSEEN, FASTER, FASTER, FASTER])) is None
    assert save_costs(KEY, costs(1.0, 0.9, 0.9, 0.9)) is not None
    shutil.rmtree(own_cache / "ckdist")
    (own_cache / "ckdist").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own_cache / "ckdist"))
    assert save_costs(KEY, costs(0.9, 0.9, 0.9, 0.9)) is None and load_costs(KEY) is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(
        pathlib.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory."))
    )
    assert save_costs(KEY, costs(0.9, 0.9, 0.9, 0.9)) is None and load_costs(KEY) is None


def test_the_oldest_files_go(own_cache, monkeypatch):
    monkeypatch.setattr(measured_cost, "KEPT_FILES", 3)
    paths = []
    for i in range(5):
        paths.append(save_costs({"number": i}, costs(0.9, 0.9, 0.9, 0.9)))
        os.utime(paths[-1], (i, i))
    assert [path.exists() for path in paths] == [False, False, True, True, True]
    assert all(
        stat.S_ISREG(path.stat().st_mode) and path.suffix == ".json"
        for path in (own_cache / "ckdist" / "prefill").iterdir()
    )


@pytest.mark.parametrize(
    "verdicts, from_tokens",
    [
        ([NO_FASTER, FASTER, FASTER, FASTER], 16),
        ([FASTER, NO_FASTER, FASTER, FASTER], 32),
        ([UNSEEN, FASTER, FASTER, FASTER], 16),
        ([NOISY, NOISY, FASTER, FASTER], 8),  # the cost model expects a gain there
        ([NO_FASTER, NOISY, FASTER, FASTER], 16),
        ([FASTER, FASTER, FASTER, FASTER], 8),
        ([FASTER, FASTER, FASTER, NOISY], sys.maxsize),
        ([FASTER, FASTER, FASTER, UNSEEN], sys.maxsize),
        ([FASTER, FASTER, FASTER, NO_FASTER], sys.maxsize),
    ],
)
def test_thresholds(verdicts, from_tokens):
    found = costs(0.9, 0.9, 0.9, 0.93, verdicts=verdicts)
    choice = prefill.choose({64: 0.2, 32: 0.1}, found, kept=False)
    assert choice.from_tokens == found.from_tokens == from_tokens
    match verdicts[-1]:
        case "faster":
            assert choice.reason == f"token-parallel from {from_tokens} tokens (measured: 7 % faster at 64)"
        case "no faster":
            assert choice.reason == "tensor-parallel (measured: token-parallel 7 % faster at 64)"
        case "no gain seen":
            assert choice.reason == "tensor-parallel (measured: token-parallel 7 % faster at 64, within the noise)"
        case "too noisy":
            assert (
                choice.reason
                == "tensor-parallel (too noisy here to measure token-parallel, predicted 20 % faster at 64)"
            )
    assert "64 tokens" in choice.details and "\n" not in choice.reason + choice.details


def test_predictions():
    found = costs(1.2, 0.95, 0.9, 0.9)
    assert found.predicted(DECODE, 24) == pytest.approx(24e-4) and found.predicted(PREFILL, 64) == pytest.approx(
        0.9 * 64e-4
    )
    assert found.predicted(DECODE, 640) == pytest.approx(640e-4) and found.predicted(DECODE, 1) == pytest.approx(1e-4)
    choice = prefill.choose({64: 0.2}, found, kept=True)
    assert choice.predicted([(PREFILL, 64), (DECODE, 8)], 10) == pytest.approx(10 * (0.9 * 64e-4 + 8e-4))
    assert dataclasses.replace(choice, costs=None).predicted([(PREFILL, 64)], 10) is None


@pytest.fixture
def own_cores(monkeypatch):
    """Nothing else runs on this process's cores, as far as a measurement can see."""
    monkeypatch.setattr(measured_cost, "times_preempted", lambda: 0)


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
        return None if reset else types.SimpleNamespace(total=self.took, moved=7)

    def run_layer(self, batch, phase):
        size = len(batch.token_ids)
        self.took = (
            self.seconds
            * size
            / 512
            * (self.ratio(size) if phase == PREFILL else 1.0)
            * math.exp(self.noise * self.draws.gauss(0, 1))
        )
        if self.noise and self.draws.random() < 1 / 30:
            self.took += self.draws.uniform(4e-3, 8e-3)
        self.now += self.took
        self.runs.append((size, phase))


def thresholds(starts: int, ratio, noise: float, gains: dict[int, float]) -> list[int]:
    """What so many starts choose, one after the other."""
    draws = random.Random(1)
    found = []
    for _ in range(starts):
        executable = Simulated(draws, ratio, noise)
        found.append(measured_cost.measure(executable, gains, lambda: executable.now).from_tokens)
        assert executable.now < measured_cost.SECONDS + 0.1
    return found


SIZES = measured_cost.sizes_of(Simulated(random.Random(1), None, 0))


@pytest.mark.parametrize("noise", [0.2, 0.5])
def test_noise_sets_no_threshold(own_cores, noise):
    """The cost model promises 15 % at every size, and is wrong. Before: 22 to 36 % of starts set a threshold for equal
    costs, 10 to 22 % for 3 % more.
    """
    promised = dict.fromkeys(SIZES, 0.15)
    assert SIZES == [512, 256, 128, 64, 32, 16, 8]
    assert sum(found < sys.maxsize for found in thresholds(200, lambda size: 1.0, noise, promised)) <= 10  # of 200: 5 %
    assert sum(found < sys.maxsize for found in thresholds(200, lambda size: 1.03, noise, promised)) <= 2  # 1 %


@pytest.mark.parametrize("noise", [0.02, 0.2, 0.5])
def test_a_gain_is_found_in_noise(own_cores, noise):
    """Token-parallel takes 15 % less from 128 tokens on, and the cost model promises it from 64 on: the threshold is
    within one size of 128.
    """
    found = thresholds(60, lambda size: 0.85 if size >= 128 else 1.0, noise, dict.fromkeys(SIZES[:4], 0.15))
    assert sum(threshold in (64, 128, 256) for threshold in found) >= 57  # of 60: 95 %


def test_a_gain_that_noise_hides_is_given_up_early(own_cores):
    """8 % where every run may take half as long or as long again: 600 pairs would not show it nine times in ten."""
    executable = Simulated(random.Random(2), lambda size: 0.92, 0.6)
    found = measured_cost.measure(executable, {512: 0.08, 256: 0.08}, lambda: executable.now)
    assert (
        (found.sizes, found.verdicts, found.pairs) == ((512,), (NOISY,), (40,))
        and not found.certain
        and save_costs(KEY, found) is None
    )


def test_without_noise_few_pairs_decide(own_cores):
    executable = Simulated(random.Random(1), lambda size: 0.9 if size > 100 else 1.2, 0.0)
    found = measured_cost.measure(executable, dict.fromkeys(SIZES), lambda: executable.now)
    assert (
        found.sizes == (64, 128, 256, 512) and found.verdicts == (NO_FASTER, FASTER, FASTER, FASTER) and found.certain
    )
    assert found.pairs == (16,) * 4 and len(executable.runs) == 2 + 2 * 16 * 4
    assert found.ratios[-1] == pytest.approx((0.9, 0.9, 0.9)) and found.from_tokens == 128
    assert [phase for _, phase in executable.runs[2:6]] == [PREFILL, DECODE, DECODE, PREFILL]


@pytest.mark.parametrize("every, verdict, pairs", [(1, NOISY, 0), (2, FASTER, 16)])
def test_pairs_in_which_a_core_was_taken_away_do_not_count(monkeypatch, every, verdict, pairs):
    """Every pair, or every second one, loses a core to another process for 100 times its time, token-parallel."""
    executable = Simulated(random.Random(1), lambda size: 0.9, 0.0)
    run_layer, lost = executable.run_layer, []

    def preempted_layer(batch, phase):
        run_layer(batch, phase)
        if phase == PREFILL and len(executable.runs) // 2 % every == 0:
            lost.append(1)
            executable.took *= 100

    monkeypatch.setattr(executable, "run_layer", preempted_layer)
    monkeypatch.setattr(measured_cost, "times_preempted", lambda: len(lost))
    found = measured_cost.measure(executable, {512: 0.1}, lambda: executable.now)
    assert (found.verdicts, found.pairs, found.certain) == ((verdict,), (pairs,), verdict == FASTER)
    assert len(executable.runs) <= 2 + 2 * (16 if every == 1 else 32)


def test_time_is_bounded(own_cache, own_cores):
    """A model whose layer takes longer than there is time for is run twice each way, and nothing is kept."""
    executable = Simulated(random.Random(1), lambda size: 0.5, 0.0, seconds=10.0)
    found = measured_cost.measure(executable, dict.fromkeys(SIZES, 0.5), lambda: executable.now)
    assert executable.runs == [(512, phase) for phase in (DECODE, PREFILL, PREFILL, DECODE)]
    assert found.pairs == (1,) and found.from_tokens == sys.maxsize and save_costs(KEY, found) is None


def test_signed_ranks():
    """Against Wilcoxon's own formula, and tables: 12 pairs of one sign have a chance of 1 in 4,096."""
    assert signed_rank([-1.0, -2.0, -3.0, 4.0]) == pytest.approx((4 - 6) / math.sqrt(4 * 5 * 9 / 6))
    assert signed_rank([]) == signed_rank([0.0, 0.0]) == 0.0
    assert signed_rank([-float(i) for i in range(1, 17)]) < -3.09 < signed_rank([-float(i) for i in range(1, 13)])
    assert signed_rank([1.0, -2.0, 3.0]) == -signed_rank([-1.0, 2.0, -3.0])


def test_a_median_within_its_bounds():
    """Against the binomial distribution: the median lies within the bounds by 92 % at least from five values on, and
    bounds are not wider than needed.
    """
    for n in range(5, 101):
        low, middle, _ = median_within([float(i) for i in range(n)])
        outside = lambda left_out: 2 * sum(math.comb(n, i) for i in range(left_out + 1)) / 2**n
        assert middle == (n - 1) / 2 and outside(int(low)) <= 0.08 and outside(int(low) + 1) > 0.04, n


def test_the_choice_is_seen(own_cache):
    words = [
        "-m",
        "ckdist.cli.main",
        "bench",
        "-m",
        str(LLAMA),
        "-t",
        "1",
        "-p",
        "48",
        "-n",
        "2",
        "-r",
        "1",
        "-c",
        "96",
        "--tune",
        "-v",
        "-o",
        "json",
    ]
    done = run_ranks(2, *words, timeout=60)
    assert done.returncode == 0, done.stderr
    prompt, generated = json.loads(done.stdout)
    found, reason = prompt["layout_choice"]["costs"], prompt["layout_choice"]["reason"]
    assert (
        found["sizes"][-1] == 96
        and f"prefill: {reason}\n" in done.stderr
        and "measure" in reason  # on a busy machine: "too noisy here to measure"
        and prompt["layout_choice"]["details"] in done.stderr
    )
    assert prompt["layers_predicted_ns"] > 0 == generated["layers_predicted_ns"]
    kept = set(found["verdicts"]) <= {FASTER, NO_FASTER}
    assert (own_cache / "ckdist" / "prefill").is_dir() == kept


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    assert save_costs(KEY, costs(0.9, 0.9, 0.9, 0.8)) is None and load_costs(KEY) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path_of(KEY).mkdir(parents=True)  # where the file would be
    assert save_costs(KEY, costs(0.9, 0.9, 0.9, 0.8)) is None and not list(path_of(KEY).parent.glob("*.[0-9]*"))
