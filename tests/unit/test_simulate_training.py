"""A training in simulated time: the pipeline's bubble, what ranks exchange and hold, failures, by formulas and sums."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckdist.comm.transports.link import Link
from ckdist.config.simulate_training_config import SimulateTrainingConfig
from ckdist.errors import ConfigError
from ckdist.plan.simulated_training import (
    Batches,
    Reliability,
    TrainedModel,
    TrainingCost,
    TrainingHost,
    TrainingMesh,
    best_interval,
    pipeline,
    ring,
    weeks,
)
from ckdist.plan.training_report import training_lines, training_report
from ckdist.train.one_f_one_b import bubble

# DeepSeek-V3's shape: 671 B parameters, 37 B of them for a token
MODEL = TrainedModel(671e9, 37e9, 61, 7168, attended=61 * 128 * 320.0)
HOST = TrainingHost(2e13, 1.5e12, 1e12, Link(1e-5, 5e10), 2e9)
COST = TrainingCost(MODEL, HOST, TrainingMesh(16, 1, 8), Batches(32, 4096, 4096))


def rng():
    return np.random.default_rng(0)


def report(cost=COST, spread=0.0, mtbf=math.inf, restart=600.0, interval=None, days=30.0, seed=0):
    return training_report(cost, spread, mtbf, restart, interval, days, seed)


@pytest.mark.parametrize("stages, batches", [(1, 1), (1, 5), (2, 2), (4, 4), (4, 16), (8, 32)])
def test_the_bubble_is_that_of_the_formula(stages, batches):
    """Narayanan et al. 2021, section 2.2: (S - 1) / M where passes take as long on each stage and rows no time."""
    times = pipeline(stages, batches, 1.0, 2.0, 0.0, 0.0, rng())
    assert times.bubble == pytest.approx(bubble(stages, 1, batches))
    assert times.busy == pytest.approx(3.0 * batches)


def test_slow_rows_and_uneven_passes_make_the_bubble_larger():
    plain, hops, spread = (pipeline(4, 8, 1.0, 2.0, hop, s, rng()).bubble for hop, s in ((0, 0), (0.2, 0), (0, 0.3)))
    assert plain < hops and plain < spread


def test_sums_of_a_ring():
    """280 GB over many ranks of 12.5 GB/s: 2 (N - 1) / N of the bytes go over each link."""
    assert ring(Link(0.0, 12.5e9), 4, 280e9) == pytest.approx(2 * 280 / 12.5 * 3 / 4)
    assert ring(Link(1e-3, 1e9), 1, 1e9) == 0


def test_memory_of_one_host_is_sixteen_bytes_a_weight_and_what_products_read():
    """Weights, gradients and two moments in float32 are 16 bytes of a parameter, as the founding papers count."""
    memory = replace(COST, mesh=TrainingMesh()).memory()
    held = sum(memory[name] for name in ("weights", "gradients", "optimizer state"))
    assert held == 16 * MODEL.parameters and memory["weights of products"] == 2 * MODEL.parameters


def test_stages_divide_weights_and_replicas_the_optimizers_state():
    memory = COST.memory()
    assert memory["weights"] == pytest.approx(4 * MODEL.parameters / 8), "every replica has all experts, as in training"
    assert memory["optimizer state"] == pytest.approx(8 * MODEL.parameters / 128)


def test_parts_of_a_step_add_up():
    for spread in (0.0, 0.2):
        found = report(spread=spread)
        assert sum(found["step_parts"].values()) == pytest.approx(found["step_seconds"])
        assert all(part >= 0 for part in found["step_parts"].values()) and found["operations_part"] < 1
    assert max(map(len, training_lines(report(mtbf=3.6e7), COST))) <= 110


@settings(max_examples=40, deadline=None)
@given(
    dp=st.sampled_from([1, 2, 8]), tp=st.integers(1, 4), pp=st.integers(1, 6),
    rate=st.floats(1e8, 1e11),
)  # fmt: skip
def test_a_faster_link_or_host_is_never_slower(dp, tp, pp, rate):
    mesh = TrainingMesh(dp, tp, pp)
    slow = replace(COST, mesh=mesh, host=replace(HOST, link=Link(1e-5, rate)))
    for host in (replace(slow.host, link=Link(1e-5, 2 * rate)), replace(slow.host, operations=4e13)):
        assert report(replace(slow, host=host))["step_seconds"] <= report(slow)["step_seconds"]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30), mtbf=st.floats(100, 1e6), restart=st.floats(0, 1e4), checkpoint=st.floats(0.1, 300),
    interval=st.floats(10, 1e5),
)  # fmt: skip
def test_all_time_goes_somewhere(seed, mtbf, restart, checkpoint, interval):
    passed = weeks(Reliability(mtbf, restart, checkpoint, interval), 1e6, np.random.default_rng(seed))
    parts = passed.useful, passed.lost, passed.writing, passed.down
    assert sum(parts) == pytest.approx(1e6) and min(parts) >= 0


def test_lost_time_is_that_of_the_formula():
    """Young 1974, to the first order: C / T + T / (2 M) of the time goes to checkpoints and what is computed again."""
    mtbf, checkpoint = 86400.0, 60.0
    interval = best_interval(mtbf, checkpoint)
    assert interval == pytest.approx(math.sqrt(2 * 60 * 86400))
    at = {
        t: weeks(Reliability(mtbf, 0.0, checkpoint, t), 3e8, rng()).goodput
        for t in (interval, interval / 5, interval * 5)
    }
    assert 1 - at[interval] == pytest.approx(checkpoint / interval + interval / (2 * mtbf), rel=0.1)
    assert at[interval] > max(at[interval / 5], at[interval * 5])


def test_a_seed_decides_everything_and_nothing_fails_unasked():
    assert report(mtbf=3.6e8, spread=0.1) == report(mtbf=3.6e8, spread=0.1)
    assert report(mtbf=3.6e8, spread=0.1) != report(mtbf=3.6e8, spread=0.1, seed=1)
    found = report()
    assert (found["failures"], found["goodput"], found["checkpoint_interval"]) == (0, 1.0, None)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SimulateTrainingConfig(model="m", expert_parallel_size=8), r"size \(8\) must be 1: `ckdist train`"),
        (lambda: replace(COST, mesh=TrainingMesh(pp=62)), "more than the 61 layers"),
        (lambda: report(mtbf=3600.0), "would fail every 28.1 s"),
        (lambda: report(replace(COST, mesh=TrainingMesh(1 << 16, 1, 61)), 0.1), "are more than 4000000 passes"),
    ],
)
def test_what_cannot_be(make, message):
    with pytest.raises(ConfigError, match=message) as error:
        make()
    assert "\n" not in str(error.value)
