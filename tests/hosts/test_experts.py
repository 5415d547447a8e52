"""Experts over two hosts: slices of every expert, and whole ones to which rows go, give the tokens of one process."""

import functools
import re
import signal
import time

import pytest

from tests.support.hosts import Hosts, kill_left, start, why_not
from tests.support.paths import GOLDEN

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces here: {why_not()}")

PROGRAM = "tests/support/programs/mixture.py"


@pytest.fixture
def hosts():
    with Hosts() as hosts:
        yield hosts


CASES = [
    ("qwen3moe", 1, "tensor", {"tensor"}),
    ("qwen3moe", 1, "expert", {"tensor", "dispatch"}),
    ("qwen3moe", 2, "tensor", {"tensor", "token"}),
    ("qwen3moe", 2, "expert", {"tensor", "token", "dispatch"}),
    ("deepseek_v2", 1, "expert", {"tensor", "dispatch"}),  # latent attention, experts that all tokens share
    ("deepseek_v2", 2, "expert", {"tensor", "dispatch"}),
    ("qwen35moe", 1, "expert", {"tensor", "dispatch"}),  # linear attention
    ("gptoss", 1, "expert", {"tensor", "dispatch"}),  # biases
]


@functools.cache
def output_of(each: int) -> str:
    """One job of `each` ranks on either host loads the models of all cases, one after the other."""
    jobs = [word for model, ranks, experts, _ in CASES if ranks == each for word in (str(GOLDEN / model), experts)]
    with Hosts() as hosts:
        output = start(hosts, "torchrun", each, PROGRAM, "tokens", *jobs)
        assert not any(output.wait(180)), output.text()
    return output.text()


@pytest.mark.parametrize("model, each, experts, ways", CASES)
def test_tokens_are_those_of_one_process(model, each, experts, ways):
    """In every way to prefill that there is; the tokens on record are those of transformers."""
    text = output_of(each)
    told = re.findall(rf"{model} {experts} (\w+): (\w+) tokens, (\d+) bytes", text)
    assert {way for way, same, sent in told if same == "equal" and int(sent) > 10_000} == ways, text


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_lost_host_ends_in_one_line(hosts, fault):
    output = start(hosts, "torchrun", 1, PROGRAM, "busy", str(GOLDEN / "qwen3moe"), "expert")
    output.wait_for(r"rank \d began", 2)
    time.sleep(0.3)
    ranks = hosts.ranks()
    ranks[1].send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    assert hosts.wait_ended([ranks[0]], 12), output.text()
    kill_left(ranks[1])
    output.wait(10)
    lines = re.findall(r"ckdist: .*", output.text())
    assert len(lines) == 1 and re.match(r"ckdist: rank 0: .*rank 1 .*step \d+", lines[0]), output.text()
    assert "Traceback" not in output.text() and hosts.wait_empty(3) == []


def test_v_says_where_experts_live_and_why(hosts):
    words = ["generate", "-m", str(GOLDEN / "qwen3moe"), "-p", "", "-n", "1", "-t", "1", "-tp", "2", "-v"]
    code, output = hosts.run(1, "-m", "ckdist.cli.main", *words)
    assert code == 2 and "tokenizer" in output, output  # the model has none; it was placed by then
    assert re.search(r"experts: (whole|slices) .* predicted to take .* ms .* µs and .* GB/s between hosts", output), (
        output
    )
