"""Plans of one job over hosts that differ."""

import json

import pytest

from ckdist.cli.main import main
from ckdist.errors import ConfigError
from ckdist.layouts.rank_shares import shares_of
from ckdist.plan.cluster import Cluster
from ckdist.plan.common_level import at_level, common_level
from ckdist.plan.compare import answer
from ckdist.plan.machine_spec import machine_named
from ckdist.plan.mixed_hosts import Kind, kinds_of, mixed_answers, staged_answers
from ckdist.plan.predict import Question, Way
from ckdist.weights.described import describe, shape_path

MODEL = describe(shape_path("llama-3.1-8b"), "Q4_K")
FAST, SLOW = machine_named("epyc-9755"), machine_named("xeon-8280")


def question(hosts: int = 1) -> Question:
    return Question(MODEL, Cluster(FAST, hosts), 4096, prompt=512)


def test_equal_hosts_are_a_cluster():
    (mixed,) = mixed_answers(question(), [Kind(FAST, 1), Kind(FAST, 2)])
    whole = answer(question(3), Way("tensor"))
    assert mixed.shares == (1, 1)
    assert mixed.decode == pytest.approx(whole.decode.tokens) and mixed.prefill == pytest.approx(whole.prefill.tokens)
    assert mixed.fullest == pytest.approx(whole.largest.total / Cluster(FAST).rank_memory)


def test_parts_are_those_that_ranks_would_measure():
    """The old host has two nodes, so two ranks. The faster division comes first."""
    best, even = mixed_answers(question(), [Kind(FAST, 2), Kind(SLOW, 1)])
    measured = shares_of([FAST.bandwidth * FAST.nodes] * 2 + [SLOW.bandwidth] * 2, [9.0] * 4)
    assert FAST.nodes == 1 and SLOW.nodes == 2
    assert best.shares == (measured[0], measured[2]) and even.shares == (1, 1)
    assert best.decode > 1.5 * even.decode


def test_stages_of_identical_hosts_are_those_of_a_cluster():
    (mixed,) = staged_answers(question(), [Kind(FAST, 1), Kind(FAST, 1)])
    whole = answer(question(2), Way("stages", stages=2))
    assert mixed.shares == (16, 16) and mixed.stages == 2
    assert mixed.decode == pytest.approx(whole.decode.tokens, rel=0.02)
    assert mixed.prefill == pytest.approx(whole.prefill.tokens, rel=0.1)
    assert mixed.fullest == pytest.approx(whole.largest.total / Cluster(FAST).rank_memory)


def test_a_stage_has_layers_in_proportion_to_its_arithmetic():
    best, *others = staged_answers(question(), [Kind(FAST, 2), Kind(machine_named("desktop"), 1)])
    assert sum(best.shares) == 32 and best.shares[0] > 3 * best.shares[2]
    even = next(one for one in others if set(one.shares) == {10, 11})
    assert best.prefill > 1.8 * even.prefill
    assert not staged_answers(question(), [Kind(FAST, 2), Kind(SLOW, 1)]), "they have one and two ranks"


def test_hosts_compute_at_the_best_level_of_all():
    assert common_level(["amx", "avx2_vnni", "avx512_bf16"]) == "avx2"
    assert common_level(["amx", "avx2_vnni"]) == "avx2_vnni" and common_level(["avx2", "neon"]) == "baseline"
    assert common_level(["avx512_vnni", "amx"]) == "avx512_vnni"
    old = at_level(FAST, "avx512_vnni")
    rates = {kind: old.product_rate(kind, 2, 256) / FAST.product_rate(kind, 2, 256) for kind in ("F32", "BF16", "Q8_0")}
    assert rates == {"F32": 1, "BF16": 0.5, "Q8_0": 1} and old.isa == "avx512_vnni"
    assert at_level(FAST, "avx2").product_rate("Q8_0", 2, 256) < FAST.product_rate("Q8_0", 2, 256) / 5


@pytest.mark.parametrize("text", ["a:0,b", "a:1,", ":2,b", "a:5000,b", "a:x,b", "a:99999999999999999999,b"])
def test_wrong_numbers_of_hosts(text):
    with pytest.raises(ConfigError, match="use NAME:HOSTS with 1 to 4096 hosts"):
        kinds_of(text)


def test_the_command(capsys):
    plan = ["plan", "-m", "llama-3.1-8b", "--type", "Q4_K", "--machine", "epyc-9755:2,xeon-8280"]
    assert main([*plan, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [host["hosts"] for host in found["hosts"]] == [2, 1] and found["answers"][0]["shares"] != [1, 1]
    assert main(plan) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].startswith("all, --tensor-split auto: ") and lines[-2].startswith("only 1 x Intel")
    assert main([*plan[:-1], "epyc-9755:2,desktop"]) == 0
    assert "all, -pp 3 -ts 15,16,1 " in capsys.readouterr().out
    assert lines[-1].startswith("all hosts compute at avx512_vnni, the best level of each; AMD EPYC 9755")
