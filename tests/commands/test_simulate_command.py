"""`ckdist simulate` as a user types it: a report, one JSON object, a picture, and one line for what is absurd."""

import json
import xml.etree.ElementTree as ET

import pytest

from ckdist.cli import main as program
from ckdist.cli.arguments import parse_arguments
from ckdist.config import SimulateConfig
from ckdist.errors import ConfigError
from ckdist.planning.step_cost import StepTotals, step_row


@pytest.fixture
def steps(tmp_path):
    shapes = [StepTotals(n, n * (n + 1) // 2, outputs=1) for n in (2, 32, 512)]
    shapes += [StepTotals(decodes=n, decode_context=n * each, outputs=n) for n in (1, 8) for each in (64, 900)]
    path = tmp_path / "steps.json"
    path.write_text(json.dumps([step_row(shape, 0.02 + 1e-3 * shape.tokens) for shape in shapes]))
    return str(path)


@pytest.fixture
def simulate(monkeypatch, capfd, steps):
    for name in program.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def run(*words):
        assert program.main(["simulate", "--steps", steps, *(str(word) for word in words)]) == 0
        return capfd.readouterr().out

    return run


def test_a_report_and_its_numbers(simulate):
    load = ("--hosts", 4, "--rate", 2, "--duration", 60, "--first-token", 1)
    found = json.loads(simulate(*load, "--json"))
    assert found["requests"] == found["finished"] and found["replicas"] == 4 and 0 < found["goodput_part"] <= 1
    text = simulate(*load)
    assert f"{found['requests']} finished" in text and "first token within 1 s" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_trace_and_clients(simulate, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt,output\n" + "".join(f"{i},50,5\n" for i in range(20)))
    assert json.loads(simulate("--trace", trace, "--json"))["finished"] == 20
    assert json.loads(simulate("--clients", 3, "--duration", 20, "--host-mtbf", 0.002, "--json"))["failures"] > 0


def test_a_picture(simulate, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "waits.svg"
    simulate("--rate", 1, "--duration", 60, "--first-token", 1, "--plot", path)
    assert ET.parse(path).getroot().tag.endswith("svg") and list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "nothing says who asks"),
        ("--rate 1 --clients 2", "--rate and --clients says who asks"),
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
        ("--rate 1000000 --duration 1000000000", "makes 1e+15 requests, of at most 20000000"),
        ("--trace /nowhere.csv", "cannot read --trace: No such file"),
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
        ("--steps x --machine y", "leave one of the two out"),
    ],
)
def test_one_of_two_says_what_steps_cost(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_arguments(SimulateConfig, ["--rate", "1", *words.split()], "ckdist simulate")
