"""Machines in numbers: what is written is read again, and a hostile file gets one line."""

import dataclasses
import math

import pytest

from ckdist import topology
from ckdist.errors import ConfigError
from ckdist.plan import this_machine
from ckdist.plan.machine_spec import (
    FORMATS,
    MachineSpec,
    catalogue_names,
    machine_named,
    machine_of,
    read_machine_file,
)
from ckdist.weights import dtypes

MACHINE = MachineSpec(
    name='a "quoted" \\ name', isa="avx2", nodes=2, cores=8, memory=64e9, bandwidth=100e9, cache=1e8,
    cache_bandwidth=2e11, attention=3e10, barrier=((2, 1e-6), (8, 2e-6)),
    rates={"F32": (5e9, 40e9), "BF16": (5e9, 40e9), "Q8_0": (2e10, 8e10), "Q4_K": (1e10, 3e10)},
)  # fmt: skip
LEAST = {
    "isa": "avx2",
    "host": {"cores": 8, "memory": 64e9},
    "memory": {"bandwidth": 1e11},
    "arithmetic": {"attention": 3e10},
    "rates": {"F32": [5e9, 4e10], "BF16": [5e9, 4e10], "Q8_0": [2e10, 8e10]},
}


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "one.toml"
    path.write_text(MACHINE.toml())
    assert read_machine_file(path) == MACHINE


def test_the_catalogue_says_that_it_is_not_measured():
    names = catalogue_names()
    assert {
        "epyc-9175f",
        "epyc-9965",
        "epyc-9755",
        "xeon-6980p",
        "xeon-8592",
        "xeon-6780e",
        "xeon-8280",
        "graviton4",
    } < (set(names))
    for name in names:
        machine = machine_named(name)
        assert machine.source == "data sheet, not measured" and bool(machine.price_per_hour) == bool(
            machine.price_source
        )
    assert machine_named("epyc-9175f").bandwidth == pytest.approx(0.8 * 12 * 6400e6 * 8)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"memory": {}}, "has no memory.bandwidth"),
        ({"memory": {"bandwidth": -1}}, "memory.bandwidth (-1) must be from 1000000.0 to 1e+16"),
        ({"memory": {"bandwidth": float("nan")}}, "memory.bandwidth (nan)"),
        ({"memory": {"bandwidth": 1e99}}, "memory.bandwidth (1e+99)"),
        ({"memory": {"bandwidth": "much"}}, "memory.bandwidth ('much') must be a number"),
        ({"memory": 3}, "memory is not known"),
        ({"host": {"cores": 2.5, "memory": 1e9}}, "host.cores (2.5) must be a whole number"),
        ({"host": {"cores": True, "memory": 1e9}}, "host.cores (True)"),
        ({"memory": {"bandwith": 1e11}}, "memory.bandwith is not known, did you mean memory.bandwidth?"),
        ({"rates": {"F32": [1e9, 1e9]}}, "rates need F32, BF16, Q8_0"),
        ({"rates": {**LEAST["rates"], "Q4_K": [1e9]}}, "rates.Q4_K needs two rates"),
        ({"rates": {**LEAST["rates"], "Q4_K": ["x"] * 2}}, "rates.Q4_K ('x') must be a number"),
        ({"rates": 7}, "rates must be a table"),
        ({"steps": {"barrier": 7}}, "steps.barrier must be a list of pairs"),
        ({"steps": {"barrier": [[8]]}}, "steps.barrier must be at most 256 pairs"),
        ({"steps": {"barrier": [[8, "x"]]}}, "steps.barrier ('x') must be a number"),
        ({"steps": {"barrier": [[8, 1e-6], [2, 1e-6]]}}, "needs growing numbers of threads"),
        ({"isa": "sse9"}, "ISA sse9 is not known; use one of baseline, avx2, "),
        ({"isa": ""}, "has no isa: give the level of instructions"),
        ({"name": "two\nlines"}, "name must be a text of one line"),
    ],
)  # fmt: skip
def test_a_hostile_file_gets_one_line(change, said):
    with pytest.raises(ConfigError) as error:
        machine_of({**LEAST, **change}, "file.toml")
    assert said in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_none(tmp_path):
    for text in (b"\xff", b"[", b"a = " + b"[" * 5000, b"#" * (2 << 20)):
        path = tmp_path / "bad.toml"
        path.write_bytes(text)
        with pytest.raises(ConfigError) as error:
            read_machine_file(path)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="did you mean epyc-9175f"):
        machine_named("epyc-9175")


def test_a_file_of_an_earlier_version_is_refused_in_one_line():
    """All figures that went are named."""
    old = {**LEAST, "memory": {"bandwidth": 1e11, "achieved_bandwidth": 0.8}, "products": {"Q4_K": [1e9] * 5}}
    old["arithmetic"] = {"attention": 1e9, "f32": 4e10}
    names = "memory.achieved_bandwidth, arithmetic.f32, products.Q4_K are not known; a file of an earlier version"
    with pytest.raises(ConfigError, match=names):
        machine_of(old, "file.toml")


def test_a_machine_has_at_most_16_figures():
    assert sum(item.type not in ("str", str) for item in dataclasses.fields(MachineSpec)) == 16


def test_rates_lie_between_those_of_one_and_of_many_rows():
    rates = [MACHINE.product_rate("Q4_K", 2, rows) for rows in (0.5, 1, 2, 4, 100, 256, 4096)]
    assert rates == sorted(rates) and rates[1] == pytest.approx(1e10) and rates[-1] == pytest.approx(3e10)
    assert MACHINE.product_rate("Q6_K", 2, 256) == pytest.approx(8e10)  # as Q8_0, which has the same activations


def test_what_fits_the_caches_is_read_from_them():
    read = [MACHINE.read_rate(8, 1, size) for size in (1e7, 1e8, 1.5e8, 1e9, 1e12)]
    assert read[:2] == [2e11, 2e11] and read == sorted(read, reverse=True) and read[-1] == pytest.approx(1e11)
    missed = MACHINE.missed(2e8)
    assert missed == pytest.approx(1 - math.exp(-2 * missed)) and MACHINE.read_rate(8, 2, 1e12) == pytest.approx(5e10)


def test_barriers_grow_with_threads():
    assert [MACHINE.barrier_seconds(n) for n in (1, 2, 5, 8, 16)] == pytest.approx([0, 1e-6, 1.5e-6, 2e-6, 4e-6])


def test_a_measured_machine_has_all_figures(monkeypatch, tmp_path):
    monkeypatch.setattr(this_machine, "SECONDS", 1e-4)
    monkeypatch.setattr(this_machine, "PASSES", 1)
    kinds = [dtypes.BY_NAME[name] for name in FORMATS]
    for name in ("LEAST_LARGE", "LEAST_STREAMED"):
        monkeypatch.setattr(this_machine, name, 1 << 20)
    small_cache = dataclasses.replace(topology.this_machine(), l3_bytes=1 << 20)
    spec = this_machine.measure_machine(small_cache, kinds)
    path = tmp_path / "saved.toml"
    path.write_text(spec.toml())
    assert read_machine_file(path).rates.keys() == set(FORMATS)
    figures = (
        spec.bandwidth,
        spec.attention,
        spec.elementwise,
        *(rate for pair in spec.rates.values() for rate in pair),
    )
    assert min(figures) > 1e6 and all(seconds > 0 for _, seconds in spec.barrier)
