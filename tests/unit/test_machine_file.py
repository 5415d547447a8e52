"""Machines in numbers: what is written is read again, and a hostile file gets one line."""

import dataclasses

import pytest

from ckdist.errors import ConfigError
from ckdist.planning.machine_spec import MachineSpec, catalogue_names, machine_named, machine_of, read_machine_file

MACHINE = MachineSpec(
    name='a "quoted" \\ name', isa="avx2", nodes=2, cores=8, memory=64e9, bandwidth=100e9, f32=40e9, bf16=40e9,
    int8=80e9, products={"Q4_K": (1e9, 3e9, 8e9, 20e9, 30e9)},
)  # fmt: skip
LEAST = {
    "isa": "avx2",
    "host": {"cores": 8, "memory": 64e9},
    "memory": {"bandwidth": 1e11},
    "arithmetic": {"f32": 4e10, "bf16": 4e10, "int8": 8e10},
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
        assert machine.source == "data sheet, not measured" and machine.uncertainty >= 0.3
    assert machine_named("epyc-9175f").bandwidth == 12 * 6400e6 * 8


@pytest.mark.parametrize(
    "change, said",
    [
        ({"memory": {}}, "has no memory.bandwidth"),
        ({"memory": {"bandwidth": -1}}, "memory.bandwidth (-1) must be from 1000000.0 to 1e+16"),
        ({"memory": {"bandwidth": float("nan")}}, "memory.bandwidth (nan)"),
        ({"memory": {"bandwidth": 1e99}}, "memory.bandwidth (1e+99)"),
        ({"memory": {"bandwidth": "much"}}, "memory.bandwidth ('much') must be a number"),
        ({"memory": 3}, "memory is 3; it must be a table"),
        ({"host": {"cores": 2.5, "memory": 1e9}}, "host.cores (2.5) must be a whole number"),
        ({"host": {"cores": True, "memory": 1e9}}, "host.cores (True)"),
        ({"memory": {"bandwith": 1e11}}, "memory.bandwith is not known, did you mean memory.bandwidth?"),
        ({"host": {**LEAST["host"], "nodes": 3, "sockets": 2}}, "not a multiple of host.sockets 2"),
        ({"products": {"Q4_K": [1e9]}}, "products.Q4_K has 1 rates, and needs 5"),
        ({"products": {"Q4_K": ["x"] * 5}}, "products.Q4_K ('x') must be a number"),
        ({"memory": {"bandwidth": 1e11, "reuse": 7}}, "memory.reuse must be a list of pairs"),
        ({"memory": {"bandwidth": 1e11, "reuse": [[1e8]]}}, "memory.reuse must be at most 64 pairs"),
        ({"memory": {"bandwidth": 1e11, "reuse": [[1e8, "x"]]}}, "memory.reuse ('x') must be a number"),
        ({"memory": {"bandwidth": 1e11, "reuse": [[1e8, 5e10], [1e9, 6e10]]}}, "and rates must not"),
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


def test_rates_lie_between_what_was_measured():
    rates = [MACHINE.product_rate("Q4_K", 2, rows) for rows in (0.5, 1, 2, 4, 100, 256, 4096)]
    assert rates == sorted(rates) and rates[0] == rates[1] == 1e9 and rates[3] == pytest.approx(3e9)
    assert rates[-1] == rates[-2] == pytest.approx(30e9)
    assert MACHINE.product_rate("BF16", 1, 512) == 40e9 * 0.7 == 8 * MACHINE.product_rate("BF16", 1, 1)
    assert dataclasses.replace(MACHINE, attention=5e9).attention_rate() == 5e9
