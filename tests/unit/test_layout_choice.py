"""Which numbers of stages there may be, and which is chosen on which link."""

import pytest

from ckdist.comm.transports.link import Link
from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.planning import layout_choice
from ckdist.planning.cluster import Cluster, PlannedWorld
from ckdist.planning.layout_choice import best_layout, choose_layout, measured_machine, stage_counts
from ckdist.planning.machine_spec import PRODUCT_ROWS, MachineSpec
from ckdist.weights.described import describe_config
from ckdist.weights.dtypes import BY_NAME

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
    machine = MachineSpec(
        isa="avx2",
        cores=4,
        memory=64e9,
        bandwidth=50e9,
        f32=40e9,
        bf16=40e9,
        int8=80e9,
        link_rate=rate,
        link_seconds=seconds,
    )
    choice = best_layout(describe_config(MODEL, "config.json", "Q4_K"), Cluster(machine, 2), config(), [1, 2])
    assert choice.stages == stages
    ways = ["tensors over all ranks", "2 stages"]
    assert choice.reason.startswith(f"{ways[stages - 1]} rather than {ways[2 - stages]}: predicted ")
    assert f"{rate / 1e6:.0f} MB/s between hosts" in choice.reason


def test_nothing_is_measured_where_there_is_no_choice():
    checkpoint = describe_config(MODEL, "config.json", "Q4_K")
    assert choose_layout(PlannedWorld(1, 4), config(), checkpoint).reason.endswith("all ranks share memory")
    assert choose_layout(PlannedWorld(2, 1), config(pipeline_parallel_size=2), checkpoint).stages == 2


def test_products_are_measured_with_the_kernels_of_the_models_own_types(monkeypatch):
    """Not by the peak of the arithmetic, which products with quantised weights do not come near."""
    monkeypatch.setattr(layout_choice, "ROUNDS", 2)
    monkeypatch.setattr(layout_choice, "measured_link", lambda *_: Link(1e-3, 12e6))
    checkpoint = describe_config(MODEL, "config.json", "Q4_K")
    machine = measured_machine(SingleWorld(), config(threads=1), checkpoint)
    assert set(machine.products) == {"Q4_K", "Q8_0"} and machine.link == Link(1e-3, 12e6)
    for rates in machine.products.values():
        assert len(rates) == len(PRODUCT_ROWS) and min(rates) > 0
    quantised = measured_machine(SingleWorld(), config(threads=1, quantize="q8_0"), describe_config(MODEL, "c", "BF16"))
    assert set(quantised.products) == {"Q8_0"}


def test_what_a_rank_has_measured_is_not_measured_at_the_next_start(monkeypatch, tmp_path):
    """Over hosts the layout is chosen at every start; --layout auto measures again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no other test may find these rates
    measured = []
    monkeypatch.setattr(layout_choice, "_measured_rates", lambda cpus, types: measured.append(cpus) or [1.0] * 8)
    types = [BY_NAME["F16"].number]
    rates = [layout_choice._best_rates(SingleWorld(), (0,), types, anew) for anew in (False, False, True)]
    assert rates == [[1.0] * 8] * 3
    assert len(measured) == 2 * layout_choice.ROUNDS
