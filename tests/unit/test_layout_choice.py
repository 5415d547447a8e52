"""Which numbers of stages there may be, and which is chosen on which link."""

import pytest

from ckdist.comm.transports.link import Link
from ckdist.config.engine_config import EngineConfig
from ckdist.layouts.layout_choice import best_layout, choose_layout, layout_advice, stage_counts
from ckdist.plan.cluster import PlannedWorld
from ckdist.weights.described import describe_config

MODEL = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
}  # fmt: skip


def config(**fields) -> EngineConfig:
    return EngineConfig(model="described", **fields)


@pytest.mark.parametrize(
    "hosts, local, fields, counts",
    [
        (2, 1, {}, [1, 2]),
        (2, 2, {}, [1, 2, 4]),
        (3, 2, {}, [1, 3, 6]),  # two stages would be of one and a half hosts
        (2, 6, {}, [1, 2, 4, 6]),  # 12 is more than there are layers
        (4, 1, {"tensor_parallel_size": 2}, [2]),
        (4, 1, {"pipeline_parallel_size": 4}, [4]),
        (1, 1, {}, [1]),
    ],
)
def test_stages_are_of_whole_hosts_or_parts_of_one(hosts, local, fields, counts):
    assert stage_counts(PlannedWorld(hosts, local), config(**fields), 6) == counts


@pytest.mark.parametrize("rate, seconds, stages", [(1e7, 1e-3, 2), (1e11, 1e-6, 1)])
def test_a_slow_link_favours_stages(rate, seconds, stages):
    link = Link(seconds, rate)
    choice = best_layout(describe_config(MODEL, "config.json", "Q4_K"), config(), [1, 2], (2, 8), link)
    assert choice.stages == stages
    ways = ["tensors over all ranks", "2 stages"]
    assert choice.reason.startswith(f"{ways[stages - 1]} rather than {ways[2 - stages]}: predicted ")
    assert f"{rate / 1e6:.0f} MB/s between hosts" in choice.reason


def test_more_threads_favour_stages():
    """The link takes the same time, and the rest takes less."""
    checkpoint, link = describe_config(MODEL, "config.json", "Q4_K"), Link(1e-4, 1e9)
    stages = [best_layout(checkpoint, config(), [1, 2], (2, threads), link).stages for threads in (2, 512)]
    assert stages == [1, 2]


def test_nothing_is_measured_where_there_is_no_choice():
    checkpoint = describe_config(MODEL, "config.json", "Q4_K")
    assert choose_layout(PlannedWorld(1, 4), config(), checkpoint).reason.endswith("all ranks share memory")
    assert choose_layout(PlannedWorld(2, 1), config(pipeline_parallel_size=2), checkpoint).stages == 2


@pytest.mark.parametrize(
    "exchanges, advice",
    [((0.05, 0.6), "this network suits -pp 2: 2 stages rather than"), ((2e-5, 2e-4), None), ((), None)],
)
def test_tensors_over_a_slow_link_get_advice(exchanges, advice):
    """The link of 50 ms is limited by packet loss too."""
    checkpoint = describe_config(MODEL, "config.json", "Q4_K")
    line = layout_advice(PlannedWorld(2, 1), config(pipeline_parallel_size=1), checkpoint, 4, exchanges)
    assert line is None if advice is None else line.startswith(advice)
