"""`ckdist simulate` as a user types it: a report, one JSON object, a picture, and one line for what is absurd."""

import json
import xml.etree.ElementTree as ET

import pytest

from ckdist.cli import main as program
from ckdist.cli.arguments import parse_arguments
from ckdist.config.simulate_config import SimulateConfig
from ckdist.errors import ConfigError
from ckdist.plan.step_cost import StepTotals, step_row


@pytest.fixture
def steps(tmp_path):
    shapes = [StepTotals(n, n * (n + 1) // 2, outputs=1) for n in (2, 32, 512)]
    shapes += [StepTotals(decodes=n, decode_context=n * each, outputs=n) for n in (1, 8) for each in (64, 900)]
    path = tmp_path / "steps.json"
    path.write_text(json.dumps([step_row(shape, 0.02 + 1e-3 * shape.tokens) for shape in shapes]))
    return str(path)


@pytest.fixture
def ckdist(monkeypatch, capfd):
    for name in program.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def run(*words):
        assert program.main([str(word) for word in words]) == 0
        return capfd.readouterr().out

    return run


@pytest.fixture
def simulate(ckdist, steps):
    return lambda *words: ckdist("simulate", "--steps", steps, *words)


def test_a_report_and_its_numbers(simulate):
    load = ("--hosts", 4, "--rate", 2, "--duration", 60, "--first-token", 1)
    found = json.loads(simulate(*load, "--json"))
    assert found["requests"] == found["finished"] and found["replicas"] == 4 and 0 < found["goodput_part"] <= 1
    text = simulate(*load)
    assert f"{found['requests']} finished" in text and "first token within 1 s" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_trace_and_clients(simulate, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt,output\n" + "".join(f"{i},50,5\n" for i in range(20)))
    assert json.loads(simulate("--trace", trace, "--json"))["finished"] == 20
    assert json.loads(simulate("--clients", 3, "--duration", 20, "--host-mtbf", 0.002, "--json"))["failures"] > 0


def test_predicted_steps_of_a_model_that_is_not_here(ckdist):
    """A host of twice the bandwidth and arithmetic answers sooner; two stages share the work of a step."""
    words = ("simulate", "-m", "qwen3-0.6b", "--type", "Q8_0", "--rate", 1, "--duration", 30, "-c", 1024, "--json")
    slow, fast, stages = (
        json.loads(ckdist(*words, "--machine", machine, *more))
        for machine, more in (
            ("desktop", ()),
            ("epyc-9755", ()),
            ("desktop", ("--hosts", 2, "--hosts-per-replica", 2, "-pp", 2)),
        )
    )
    assert fast["first_token"]["p50"] < slow["first_token"]["p50"] and stages["replicas"] == 1
    assert stages["utilisation"] < slow["utilisation"]


def test_a_training(ckdist, tmp_path):
    words = ("simulate-training", "-m", "deepseek-r1", "--machine", "epyc-9965", "-dp", 2, "-tp", 4, "-pp", 4)
    found = json.loads(ckdist(*words, "--host-mtbf", 5000, "--json"))
    assert found["hosts"] == 32 and found["bubble"] > 3 / 16 and 0 < found["goodput"] < 1 and found["failures"] > 0
    assert sum(found["weeks"].values()) == pytest.approx(1)
    assert found["memory"]["optimizer state"] == pytest.approx(8 * 671e9 / 32, rel=0.01)
    assert "bubble" in ckdist(*words)


def test_a_picture(simulate, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "waits.svg"
    simulate("--rate", 1, "--duration", 60, "--first-token", 1, "--plot", path)
    assert ET.parse(path).getroot().tag.endswith("svg") and list(tmp_path.glob(".*")) == []


def test_a_model_that_does_not_fit(monkeypatch, capfd):
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    program.main(["simulate", "-m", "kimi-k2", "--type", "Q4_K", "--machine", "desktop", "--rate", "1"])
    said = capfd.readouterr().err
    assert codes == [2] and "give more --hosts-per-replica" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "no flag sets the load"),
        ("--rate 1 --clients 2", "--rate and --clients set the load"),
        ("--rate 1 --hosts 0", r"--hosts \(0\) must be from 1"),
        ("--rate 1 --hosts 1000000000000", "--hosts"),
        ("--rate -1", "--rate"),
        ("--rate nan", "is not a finite number"),
        ("--rate 1 --think 2", "--think has no meaning with --rate"),
        ("--trace x --output-tokens 5", "--output-tokens has no meaning with --trace"),
        ("--rate 1 --hosts 3 --hosts-per-replica 2", "is not a multiple"),
        ("--rate 1 --sample 2 --router least", "leave one out"),
        ("--clients 1 --router random", "leave it out"),
        ("--rate 1 --cache-tokens 5", "does not hold one sequence of 8192"),
    ],
)
def test_what_cannot_be(steps, words, message):
    with pytest.raises(ConfigError, match=message) as error:
        parse_arguments(SimulateConfig, ["--steps", steps, *words.split()], "ckdist simulate")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "words, message",
    [
        ("--rate 1 --prompt-tokens normal:5", "is not a number or uniform:LOW:HIGH"),
        ("--rate 1000000 --duration 1000000000", "makes 1e+15 requests, of at most 5000000"),
        ("--clients 1 --host-mtbf 0.001 --restart 0 --duration 1e9", "fail 2.8e+08 times, and at most 1000000"),
        ("--clients 1000000 --hosts 100000 --duration 1e9", "steps, and at most 1e+10"),
        ("--trace /nowhere.csv", "cannot read --trace /nowhere.csv: No such file"),
    ],
)
def test_what_is_found_later(monkeypatch, capfd, steps, words, message):
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    program.main(["simulate", "--steps", steps, *words.split()])
    assert codes == [2]
    said = capfd.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "measured or predicted"),
        ("--steps x -m y", "measured or predicted"),
        ("--steps x --machine y", "leave one of them out"),
    ],
)
def test_one_of_two_says_what_steps_cost(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_arguments(SimulateConfig, ["--rate", "1", *words.split()], "ckdist simulate")
