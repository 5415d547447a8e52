"""`--tensor-split`: ranks that hold unequal parts of a model compute the logits of one rank."""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.config.options import proportions
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence
from ckdist.errors import ConfigError
from ckdist.layout import even_ranges, ranges_by_shares
from ckdist.layouts.rank_shares import given_shares, rank_shares, shares_of
from ckdist.layouts.stage_plan import even_slices
from ckdist.weights.checkpoint import open_checkpoint
from tests.support.distinct_families import distinct_families, prefill_of
from tests.support.paths import GOLDEN
from tests.support.situations import driven
from tests.support.thread_ranks import ThreadWorld, run_threads

HOSTS = ("one", "one", "two", "two")


@given(st.integers(0, 300), st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 40))
def test_ranges_cover_everything_in_proportion(size, shares, unit):
    ranges = ranges_by_shares(size, shares, unit)
    assert ranges[0][0] == 0 and ranges[-1][1] == size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    for (begin, end), share in zip(ranges, shares, strict=True):
        assert begin == end or begin % unit == 0
        assert abs((end - begin) - size * share / sum(shares)) < 2 * unit
    filled = ranges_by_shares(size, shares, unit, 1)
    assert filled[-1][1] == size and all(a[1] == b[0] for a, b in itertools.pairwise(filled))
    assert all(begin < end for begin, end in filled) or size <= unit * (len(shares) - 1)
    joined = [sum(shares[:2]), *shares[2:]]
    assert ranges_by_shares(size, joined, unit)[0] == (0, ranges[min(1, len(ranges) - 1)][1])
    assert ranges_by_shares(size, [3] * len(shares), unit) == even_ranges(size, len(shares), unit)


def logits_of(world, path, split: str, **settings) -> tuple[np.ndarray, int]:
    """Logits of a prompt in two chunks and of a token behind it, and the bytes of this rank's weights."""
    exact = {"cache_type_k": "f32", "cache_type_v": "f32", "threads": 1, "ubatch_size": 32, "ctx_size": 64}
    model = load_model(EngineConfig(model=str(path), tensor_split=split, **exact | settings), world)

    def body(executable):
        sequence = SingleSequence(executable)
        return np.concatenate([sequence.feed(np.arange(5, 45)), sequence.feed([7])])

    result = driven(world, model.executable, body)
    model.executable.close()
    return result, model.weight_bytes


@pytest.mark.parametrize(
    "prefill, path",
    [(prefill_of(path, ("token", "tensor")[i % 2]), path) for i, path in enumerate(distinct_families())],
    ids=lambda value: getattr(value, "name", value),
)
def test_logits_are_those_of_one_rank(prefill, path):
    expected, _ = logits_of(SingleWorld(), path, "even")
    (found, large), (_, small), _ = run_threads(3, lambda world: logits_of(world, path, "5,1,2", prefill=prefill))
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    assert large > small


@pytest.mark.parametrize("stages, experts", [(1, "tensor"), (2, "tensor"), (1, "expert")])
@pytest.mark.parametrize("name", ["qwen2", "qwen3moe"])
def test_logits_over_hosts_are_those_of_one_rank(name, stages, experts):
    path, settings = GOLDEN / name, {"pipeline_parallel_size": stages, "experts": experts, "transport": "tcp"}
    expected, _ = logits_of(SingleWorld(), path, "even")
    ranks = run_threads(HOSTS, lambda world: logits_of(world, path, "9,1", **settings))
    assert np.abs(ranks[0][0] - expected).max() <= 1e-5 * np.abs(expected).max()


def test_ranks_may_want_threads_and_leave_them_out():
    """The numbers of threads are no collective call of some ranks only."""
    path = GOLDEN / "qwen2"
    expected, _ = logits_of(SingleWorld(), path, "even")
    ranks = run_threads(HOSTS, lambda world: logits_of(world, path, "even", threads=world.rank % 2, transport="tcp"))
    assert np.abs(ranks[0][0] - expected).max() <= 1e-5 * np.abs(expected).max()


def test_numbers_are_of_ranks_or_of_hosts():
    shares = lambda text, hosts=HOSTS: given_shares(text, ThreadWorld(0, hosts, {"barrier": None}))
    assert shares("3,1") == (3, 3, 1, 1) and shares("0.7,0.3") == (7, 7, 3, 3) and shares("2,2") == ()
    assert shares("4,2,1,1") == (4, 2, 1, 1) and shares("3,1", ("a", "a", "b")) == (3, 3, 2)
    with pytest.raises(
        ConfigError, match="has 3 numbers: give one for each of the 4 ranks, or for each of the 2 hosts"
    ):
        shares("1,2,3")
    for text in ("0,1", "a,b", "1,,2", "-1,2", ""):
        with pytest.raises(ValueError, match="neither auto nor even"):
            proportions(text)


def test_measured_shares_follow_rates_as_far_as_memory_allows():
    roomy = [9.0] * 3
    assert shares_of([10e9, 11e9, 12e9], roomy) == []  # alike: every start has the same shares
    assert shares_of([10e9, 20e9, 20e9], roomy) == [4, 8, 8]
    assert shares_of([20e9, 20e9, 20e9], [0.1, 1.0, 1.0]) == [2, 8, 8]  # 0.1, 0.45, 0.45 of the model
    assert shares_of([30e9, 10e9, 0.0], roomy) == []  # one could not be measured
    assert shares_of([20e9, 20e9, 20e9], [0.1, 0.1, 0.1]) == []  # no room anywhere: the plan of memory refuses it


def test_hosts_are_measured_and_named(monkeypatch, caplog):
    caplog.set_level("INFO")
    rates, measured = (31e9, 30e9, 15e9, 15e9), threading.local()
    monkeypatch.setattr("ckdist.layouts.rank_shares.read_rate", lambda _threads: measured.rate)
    monkeypatch.setattr("ckdist.layouts.rank_shares.hardware", lambda world, _threads: [world.hosts[world.rank]])
    checkpoint = open_checkpoint(GOLDEN / "qwen2")

    def rank(world, split="auto"):
        measured.rate = rates[world.rank]
        return rank_shares(EngineConfig(threads=1, tensor_split=split), world, checkpoint)

    assert run_threads(HOSTS, rank) == [(8, 8, 4, 4)] * 4
    assert "hosts differ, so ranks hold 8:8:4:4 parts of the model: rank 0 on one 31.0 GB/s" in caplog.text
    assert "rank 3 on two 15.0 GB/s; --tensor-split 8,8,4,4 keeps this" in caplog.text
    assert run_threads(HOSTS, lambda world: rank(world, "even")) == [()] * 4
    assert "hosts differ, and ranks hold equal parts of the model: --tensor-split auto" in caplog.text
    assert run_threads(4, rank) == [()] * 4  # one host: ranks are even
    monkeypatch.setattr("ckdist.layouts.rank_shares.hardware", lambda _world, threads: [threads])
    assert run_threads(HOSTS, rank) == [()] * 4  # equal hosts, whatever is measured


def test_a_faster_stage_has_more_layers():
    assert even_slices([1.0] * 12, 2, (3, 1)) == [(0, 9), (9, 12)]
    assert even_slices([1.0] * 12, 3, (1, 2, 3)) == [(0, 2), (2, 6), (6, 12)]
