"""`ckdist bench`: rows that carry the bound of the machine, several sequences, depth, sweeps."""

import json

import numpy as np
import pytest

from ckdist import native
from ckdist.cli import main as program
from ckdist.cli.arguments import parse_arguments
from ckdist.cli.bench_machine import Bounds
from ckdist.cli.bench_rows import ModelBench
from ckdist.cli.bench_sweep import fewest_threads
from ckdist.comm.world import SingleWorld
from ckdist.config.bench_config import BenchConfig
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import BUNDLED, load_model
from ckdist.engine.lockstep import LockstepSequences
from ckdist.engine.single import SingleSequence
from ckdist.errors import CapacityError, ConfigError
from ckdist.plan.step_cost import StepTotals, read_step_cost
from ckdist.progress import ProgressBar
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


def test_drafts(bench):
    """The bundled model drafts for itself."""
    rows = json.loads(
        bench("--spec", "suffix", "-md", BUNDLED, "-n", 40, "-npl", "1,2", "-r", 1, "-t", 1, "-o", "json")
    )
    assert [(row["text"], row["n_parallel"]) for row in rows] == [
        (text, sequences) for text in ("code", "tools", "chat") for sequences in (1, 2)
    ]
    for row in rows:
        assert row["ts_off"] > 0 and row["ts_drafts"] > 0 and row["measured_gain"] > 0 and row["predicted_gain"] > 0
    assert sum(row["drafted"] for row in rows) >= sum(row["accepted"] for row in rows)  # a busy machine may draft none


def test_machine(bench):
    names = ("read_bandwidth_1", "read_bandwidth", "fma_1", "bf16_1", "int8_1", "fma", "bf16", "int8", "barrier")
    for _ in range(3):  # other work may take the CPU during one of the measurements
        rows = json.loads(bench("machine", "-t", 2, "-o", "json"))
        assert [row["isa"] for row in rows] == [
            native.isa(),
            *(isa for isa, lacks in native.isas().items() if not lacks and isa != native.isa()),
        ]
        for row in rows:
            assert all(row[name] > 0 for name in (*names, "line_round_trip"))
        if rows[0]["int8_1"] > rows[0]["fma_1"]:
            return
    raise AssertionError(rows[0])


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


def test_sweep_of_context_has_the_columns_of_sweep_bench(bench):
    rows = json.loads(bench("-m", FOLDER, "-t", 1, "--sweep", "context", "-ub", 32, "-c", 96, "-r", 1, "-o", "json"))
    assert list(rows[0]) == ["PP", "TG", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s"]
    assert [(row["PP"], row["TG"], row["N_KV"]) for row in rows] == [(32, 8, 0), (32, 8, 32), (32, 8, 64)]
    assert all(row["S_TG t/s"] == pytest.approx(row["TG"] / row["T_TG s"]) for row in rows)


def test_sweep_of_threads_measures_both_and_picks_one(bench):
    words = ("--sweep", "threads", "-p", 32, "-n", 4, "-npl", 2, "-c", 96, "-r", 1)
    rows = json.loads(bench("-m", FOLDER, "-t", 2, *words, "-o", "json"))
    assert [row["n_threads"] for row in rows] == [1, 2] and [row["picked"] for row in rows].count("*") == 1
    assert max(row["pp of best"] for row in rows) == max(row["tg of best"] for row in rows) == 1


@pytest.mark.parametrize(
    "prefill, decode, picked",
    [
        # Kimi-K2.5 on 16, 14, 13 and 12 threads, ascending; the paper picks 13
        ((14.58, 21.58, 21.32, 24.43), (11.86, 11.67, 12.50, 12.94), 1),
        ((84, 85, 100), (90, 90, 100), 1),
        ((10, 100, 20), (100, 10, 20), 0),  # nothing is enough at both: the best at decode
        ((7,), (3,), 0),
    ],
)
def test_the_rule_that_picks_threads(prefill, decode, picked):
    assert fewest_threads(prefill, decode) == picked


@pytest.mark.parametrize("parallel, context", [(2, 256), (4, 128), (3, 100), (1, 40)])
def test_steps_of_caches_that_are_just_full(bench, parallel, context):
    words = ("-t", 1, "-ub", 64, "-np", parallel, "-c", context, "-r", 1, "-o", "json")
    rows = json.loads(bench("steps", "-m", FOLDER, *words))
    assert max(row["decodes"] for row in rows) == parallel


def test_steps_are_what_a_simulation_reads(bench, tmp_path):
    words = ("-m", FOLDER, "-t", 1, "-ub", 32, "-np", 3, "-c", 192, "-r", 2, "-o", "json")
    path = tmp_path / "steps.json"
    path.write_text(bench("steps", *words))
    rows = json.loads(path.read_text())
    shapes = {(row["prompt_tokens"], row["decodes"], row["outputs"]) for row in rows}
    assert {(2, 0, 1), (32, 0, 1), (32, 0, 0), (0, 1, 1), (0, 3, 3)} <= shapes
    decoded = [row["decode_context"] for row in rows if row["decodes"] == 3]
    assert min(decoded) + 30 < max(decoded) <= 3 * 192
    cost = read_step_cost(str(path))
    assert cost.sizes == (2, 4, 8, 16, 32) and 0 < cost.seconds(StepTotals(decodes=1, decode_context=9, outputs=1)) < 1


@pytest.mark.parametrize(
    "words, message",
    [
        (("machine", "--sweep", "threads"), "measures a model"),
        (("--sweep", "context", "-p", "7"), "leave --n-prompt out"),
        (("--sweep", "threads", "-n", "4,8"), "takes one --n-gen, not 2"),
        (("--sweep", "threads", "-p", "0"), "use --n-prompt and --n-gen above 0"),
        (("--sweep", "both"), "invalid choice"),
        (("steps", "-n", "7"), "leave --n-gen out"),
    ],
)
def test_a_sweep_refuses_what_it_does_not_measure(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_arguments(BenchConfig, words, "ckdist bench")


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
    work = ModelBench(model, BenchConfig(), Bounds(1.0, {}), ProgressBar(0, "row", "measuring")).work
    each, out = (sum(work(*count).operations.values()) for count in ((1, 0), (0, 1)))
    assert each == 2 * spec.hidden_size * (len(spec.layers) * (qkv + rest) - rest)
    assert out == 2 * spec.hidden_size * (spec.vocab_size + rest)
    assert work(7, 1).read == work(1, 1).read == pytest.approx(model.total_weight_bytes, rel=0.1)
    lockstep, single = LockstepSequences(model.executable, 3), SingleSequence(model.executable)
    lockstep.fill(np.arange(20))
    (together,) = (part.copy() for part in lockstep.run([[5, 6, 7]]))
    for token, logits in zip([5, 6, 7], together, strict=True):
        single.length = 0
        assert np.array_equal(single.feed([*range(20), token], outputs="last")[0], logits)
    with pytest.raises(CapacityError, match="3 sequences of 65 tokens"):
        lockstep.fill(np.arange(44))
    model.close()
