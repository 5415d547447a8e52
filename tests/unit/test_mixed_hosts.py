"""Plans of one job over hosts that differ."""

import json

import pytest

from ckdist.cli.main import main
from ckdist.errors import ConfigError
from ckdist.layouts.rank_shares import shares_of
from ckdist.plan.cluster import Cluster
from ckdist.plan.compare import Question, answer
from ckdist.plan.machine_spec import machine_named
from ckdist.plan.mixed_hosts import Kind, kinds_of, mixed_answers
from ckdist.plan.predict import Way
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
    assert lines[3].startswith("all, --tensor-split auto: ") and lines[-1].startswith("only 1 x Intel")
