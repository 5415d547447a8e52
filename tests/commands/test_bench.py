"""`ckdist bench`: rows that carry the bound of the machine, several sequences, depth, sweeps."""

import json

import numpy as np
import pytest

from ckdist import native
from ckdist.cli import main as program
from ckdist.cli.bench_machine import Bounds
from ckdist.comm.world import SingleWorld
from ckdist.config import EngineConfig
from ckdist.engine.launch import load_model
from ckdist.engine.lockstep import LockstepSequences
from ckdist.engine.single import SingleSequence
from ckdist.errors import CapacityError
from tests.support.paths import GOLDEN

FOLDER = GOLDEN / "llama3"


@pytest.fixture
def bench(monkeypatch, capfd):
    for name in program.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def run(*words):
        assert program.main(["bench", *(str(word) for word in words)]) == 0
        return capfd.readouterr().out

    return run


@pytest.mark.alone
def test_machine(bench):
    rows = json.loads(bench("machine", "-t", 2, "-o", "json"))
    assert [row["isa"] for row in rows] == [
        native.isa(),
        *(isa for isa, lacks in native.isas().items() if not lacks and isa != native.isa()),
    ]
    for row in rows:
        assert all(
            row[name] > 0
            for name in (
                "read_bandwidth_1",
                "read_bandwidth",
                "fma_1",
                "bf16_1",
                "int8_1",
                "fma",
                "bf16",
                "int8",
                "barrier",
                "line_round_trip",
            )
        )
    assert rows[0]["int8_1"] > rows[0]["fma_1"]


def test_rows(bench):
    rows = json.loads(
        bench("-m", FOLDER, "-t", 1, "-p", 32, "-n", 4, "-npl", "1,3", "-d", "0,40", "-r", 1, "-c", 96, "-o", "json")
    )
    assert [(r["n_prompt"], r["n_gen"], r["n_depth"], r["n_parallel"]) for r in rows] == [
        (32, 0, 0, 1), (32, 0, 40, 1), (0, 4, 0, 1), (0, 4, 0, 3), (0, 4, 40, 1), (0, 4, 40, 3)
    ]  # fmt: skip
    assert all(r["bound"] in ("bandwidth", "arithmetic") and r["bound_fraction"] > 0 for r in rows)


def test_a_table_for_people(bench):
    lines = bench("-m", FOLDER, "-t", 1, "-p", 32, "-n", 4, "-npl", 3, "-d", 40, "-r", 1, "-c", 96).splitlines()
    names, *tests = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("| -")
    )
    assert [row[names.index("test")] for row in tests] == ["pp32 @ d40", "tg4 @ d40 x 3"] and max(map(len, lines)) < 140


def test_sweep(bench):
    context, threads = (
        bench("-m", FOLDER, "-t", 2, "-n", 4, "--sweep", "-ub", 32, "-c", 96, "-r", 1).strip().split("\n| n_threads")
    )
    assert [line.split("|")[3].strip() for line in context.splitlines()[2:]] == ["0", "32", "64"]
    assert threads.count("*") == 1 and len(threads.splitlines()) == 4


def test_the_bound_is_the_slower_of_reading_and_computing():
    bounds = Bounds(100.0, {0: 10.0, 2: 40.0})
    assert bounds.seconds(1000, {2: 40.0}) == ("bandwidth", 10.0)
    assert bounds.seconds(100, {0: 20.0, 2: 40.0}) == ("arithmetic", 3.0)


def test_work_of_a_model():
    model = load_model(EngineConfig(model=str(FOLDER), threads=1, ctx_size=64), SingleWorld())
    spec = model.spec
    a, ffn = spec.layers[0].mixer, spec.layers[0].ffn
    qkv = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    rest = a.num_heads * a.head_dim + 3 * ffn.intermediate_size  # of the last layer's, made for outputs alone
    assert sum(model.work.per_token.values()) == 2 * spec.hidden_size * (len(spec.layers) * (qkv + rest) - rest)
    assert sum(model.work.per_output.values()) == 2 * spec.hidden_size * (spec.vocab_size + rest)
    lockstep, single = LockstepSequences(model.executable, 3), SingleSequence(model.executable)
    lockstep.fill(np.arange(20))
    (together,) = (part.copy() for part in lockstep.run([[5, 6, 7]]))
    for token, logits in zip([5, 6, 7], together, strict=True):
        single.length = 0
        assert np.array_equal(single.feed([*range(20), token], outputs="last")[0], logits)
    with pytest.raises(CapacityError, match="3 sequences of 65 tokens"):
        lockstep.fill(np.arange(44))
    model.close()
