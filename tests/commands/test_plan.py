"""`ckdist plan`: tables for people, JSON for programs, models without weights, and one line for what is absurd."""

import json
import subprocess
import sys

import pytest

from ckdist import native
from ckdist.cli.main import main
from ckdist.engine.load_model import BUNDLED
from ckdist.plan.machine_spec import machine_named
from tests.support.launcher import environment
from tests.unit.test_predict import MIXTURE


def plan(*words, capsys=None):
    code = main(["plan", *words])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_trillion_parameters_need_no_file(capsys):
    code, text, _ = plan("-m", "kimi-k2", "--type", "Q4_K", "--machine", "epyc-9175f", capsys=capsys)
    assert code == 0 and max(map(len, text.splitlines())) <= 80
    assert "1.03 T parameters, 31.7 B of them for a token" in text and "best: tensor" in text
    assert "data sheet, not measured" in text and "hosts" in text
    assert "W (processors alone): " in text and "no price known" in text
    assert [line.split()[0] for line in text.partition("users ")[2].splitlines()[1:6]] == ["1", "4", "16", "64", "256"]


def test_what_does_not_fit_has_no_speed_but_smaller_types(capsys):
    """A named model has its published type: a byte for most parameters."""
    code, text, _ = plan("-m", "kimi-k2", "--machine", "graviton4", capsys=capsys)
    assert code == 0 and "does not fit: no speed" in text and "such hosts would hold it" in text
    assert 950 < float(text.partition("about ")[2].partition(" GiB")[0]) < 1000
    rows = {line.split()[0]: line for line in text.partition("--type")[2].splitlines()[1:]}
    assert "does not fit" in rows["Q8_0"] and "does not fit" not in rows["Q4_K"]


@pytest.mark.parametrize("name", ["llama-3-8b", "meta-llama/Llama-3.1-8B-Instruct"])
def test_a_near_name_is_planned_and_said(name, capsys):
    code, text, err = plan("-m", name, "--machine", "desktop", "--json", capsys=capsys)
    assert code == 0 and json.loads(text)["model"].endswith("llama-3.1-8b.json") and "as llama-3.1-8b" in err


def test_a_price_gives_the_cost_of_tokens_in_every_layout(capsys):
    words = ("-m", str(BUNDLED), "--machine", "epyc-9755", "--hosts", "2", "--price", "3.6")
    found = json.loads(plan(*words, "--json", capsys=capsys)[1])
    for phase in ("decode", "prefill"):
        for way in found["ways"]:
            speed = way[phase]["tokens_per_second"]
            assert way[phase]["cost_of_a_million"] == pytest.approx(2 * 3.6 / 3600 * 1e6 / speed)
    text = plan(*words, capsys=capsys)[1]
    rows = text.partition("cost of 1M tokens")[2].splitlines()[1:]
    assert len(rows) == len(found["ways"]) and "7.20 an hour (--price)" in text


def test_a_long_plan_names_its_finished_layouts(capsys, monkeypatch):
    monkeypatch.setattr("ckdist.cli.plan.SILENT_SECONDS", 0.0)
    _, _, err = plan("-m", str(BUNDLED), "--machine", "xeon-8280", capsys=capsys)
    lines = err.splitlines()
    assert (
        len(lines) == len(set(lines))
        and "plan: 16 x Intel Xeon Platinum 8280, two sockets, data (16 replicas)" in lines
    )


def test_several_machines_are_compared(capsys):
    """The machine with the best way by the objective comes first."""
    words = ["-m", str(BUNDLED), *(f"--machine={name}" for name in ("desktop", "epyc-9755", "xeon-8280")), "-n", "64"]
    code, text, err = plan(*words, "--json", capsys=capsys)
    assert code == 0, err
    speeds = [
        (one["machine"]["name"], 1 / way["decode"]["tokens_per_second"], 1 / way["prefill"]["tokens_per_second"])
        for one in json.loads(text)
        for way in one["ways"]
    ]
    for objective, decode, prefill in (("total", 64, 2048), ("decode", 1, 0), ("prefill", 0, 1)):
        best = min(speeds, key=lambda way: decode * way[1] + prefill * way[2])[0]
        code, text, _ = plan(*words, "--objective", objective, capsys=capsys)
        rows = [line for line in text.splitlines()[2:] if not line.startswith(" ")]
        assert len(rows) == 3 and rows[0].startswith(best[:22]) and max(map(len, text.splitlines())) <= 80


def test_hosts_have_a_column_for_each_layout(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    _, text, _ = plan("-m", str(tmp_path), "--machine", "epyc-9755", capsys=capsys)
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("hosts ") and "tok/s" in line)
    assert set(lines[head].split()[1:-2]) == {"tensor", "stages", "experts", "data"}
    assert all(line.count("*") == 1 for line in lines[head + 1 : head + 6])


def test_json_has_every_way(capsys):
    code, text, _ = plan(
        "-m", str(BUNDLED), "--machine", "xeon-8280", "--hosts", "2", "--sequences", "4", "--json", capsys=capsys
    )
    found = json.loads(text)
    assert code == 0 and {way["name"] for way in found["ways"]} == {"tensor", "token", "stages", "data"}
    for way in found["ways"]:
        memory = way["memory"][0]
        parts = ("weights", "cache", "states", "activations", "buffers", "process")
        assert way["fits"] and memory["total"] == sum(memory[part] for part in parts)
        assert way["decode"]["low"] < way["decode"]["tokens_per_second"] < way["decode"]["high"]
        assert way["decode"]["bound"] in way["decode"]["parts"]


def test_drafts_are_priced_by_layout(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE | {"num_nextn_predict_layers": 1}))
    asked = ("-m", str(tmp_path), "--type", "Q4_K", "--machine", "desktop", "--hosts", "2", "--acceptance", "0.95")
    found = json.loads(plan(*asked, "--spec", "mtp", "--json", capsys=capsys)[1])["ways"]
    ways = {way["name"]: way["drafts"] for way in found}
    assert (ways["stages"]["drafted"], ways["stages"]["gain"]) == (0, 1)  # the layer has no stages
    text = plan(*asked, "--spec", "ngram", capsys=capsys)[1]
    rows = [line.split() for line in text.splitlines() if line.startswith("--spec ngram")]
    assert {row[2] for row in rows} == ways.keys() and all(float(row[-2]) > ways[row[2]]["gain"] for row in rows)
    assert max(map(len, text.splitlines())) <= 80 and "95% are right" in text


def test_a_folder_without_weights_and_its_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "config.json").write_bytes((BUNDLED / "config.json").read_bytes())
    machine = tmp_path / "own.toml"
    machine.write_text(machine_named("desktop").toml())
    picture = tmp_path / "plan.svg"
    code, text, err = plan("-m", str(tmp_path), "--machine", str(machine), "--plot", str(picture), capsys=capsys)
    assert code == 0, err
    assert "best: tensor" in text and picture.read_text().startswith("<?xml")


PLANS = f"""
from ckdist.cli.main import main
for name in ("xeon-8592", "graviton4"):
    assert main(["plan", "-m", {str(BUNDLED)!r}, "--machine", name, "--json"]) == 0
"""


def test_plans_of_a_machine_do_not_depend_on_the_cpu_that_computes_them():
    """The lowest level of this CPU and its best: a plan of prompts in BF16 differed 12.5 times."""
    plain, best = (
        subprocess.run(
            [sys.executable, "-c", PLANS], env={**environment(), **level}, capture_output=True, text=True, timeout=120
        )
        for level in ({"CKDIST_ISA": "baseline"}, {"CKDIST_ISA": next(k for k, v in native.isas().items() if not v)})
    )
    assert plain.returncode == best.returncode == 0, plain.stderr + best.stderr
    assert plain.stdout.count("prefill") and plain.stdout == best.stdout


@pytest.mark.parametrize(
    "method, more",
    [("full", ["--zero-stage", "3", "--optim", "adafactor", "--weights-dtype", "bfloat16"]), ("lora", [])],
)
def test_a_training_is_planned(method, more, capsys):
    words = ["-m", str(BUNDLED), "--machine", "xeon-8280", "--train", method, "--batch-tokens", "512", *more]
    code, text, err = plan(*words, capsys=capsys)
    assert code == 0, err
    assert "dp 2" in text and "tp 2" in text and "optimizer state" in text and max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "words, said",
    [
        (["--hosts", "0"], "--hosts (0) must be from 1"),
        (["--context", "-1"], "--context (-1) must be from 0"),
        (["--context", "999999999"], "more than the 40960 positions"),
        (["--machine", "epyc-9176f"], "did you mean epyc-9175f?"),
        (["--machine", "absent.toml"], "cannot read absent.toml"),
        (["--threads", "64"], "more than the 16 cores of a node"),
        (["--type", "Q9"], "--type Q9 is not known"),
        (["--machine", "desktop", "--machine", "epyc-9755", "--train", "full"], "--train is for one --machine"),
        (["--train", "lora", "--zero-stage", "3"], "zero_stage (3) trains all weights"),
        (["--objective", "cheap"], "--objective"),
        (["--spec", "mtp"], "qwen3-0.6b.json names none: use --spec suffix"),
        (["--spec", "model"], "--spec model and --model-draft MODEL need each other"),
        (["--spec", "eagle"], "--spec eagle is not supported"),
        (["--plot", "plan.doc"], "a picture's file must end with .svg"),
        (["--hosts", "4096", "--machine", "xeon-6980p"], "a plan has from 1 to"),
        (["--hosts", "3", "--machine", "desktop:1,xeon-8280:2"], "counts the hosts"),
        (["--train", "lora", "--machine", "desktop:1,xeon-8280:2"], "is one job"),
    ],
)
def test_absurd_input_gets_one_line(words, said, capsys, monkeypatch):
    ended = []
    monkeypatch.setattr("os._exit", ended.append)
    machine = [] if "--machine" in words else ["--machine", "desktop"]
    main(["plan", "-m", "qwen3-0.6b", *machine, *words])
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and ended == [2]


def test_absurd_models_get_one_line(tmp_path, capsys, monkeypatch):
    ended = []
    monkeypatch.setattr("os._exit", ended.append)
    config = json.loads((BUNDLED / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**12}))
    (tmp_path / "machine.toml").write_text('name = "x"\n[host]\ncores = 1\nmemory = 1e9\n')
    for model, machine, said in (
        (str(tmp_path), "desktop", "num_hidden_layers"),
        ("kimi-k3", "desktop", "did you mean kimi-k2?"),
        ("kimi-k2", str(tmp_path / "machine.toml"), "has no memory.bandwidth"),
    ):
        main(["plan", "-m", model, "--machine", machine])
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1, err
    assert ended == [2, 2, 2]
