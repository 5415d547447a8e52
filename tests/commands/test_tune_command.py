"""`ckdist tune` and `ckdist data check`: no configuration file, settings from the data, and a plan before the start."""

import json
import logging
import subprocess
import sys

import pytest

from ckdist.cli.main import run
from ckdist.engine.load_model import BUNDLED
from ckdist.errors import ConfigError
from ckdist.train.tuning import default_epochs


@pytest.fixture
def chats(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = [
        {"conversations": [{"from": "human", "value": f"Say {word}."}, {"from": "gpt", "value": word}]}
        for word in ("yes", "no", "\x1b[31mred")
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, [*records, {"body": 1}])))
    return "chats.jsonl"


def test_a_check_shows_counts_reasons_and_the_learned_tokens(chats, capsys):
    assert run(["data", "check", chats, "-m", str(BUNDLED), "--samples", "3", "--max-length", "9"], None) == 1
    out = capsys.readouterr().out
    assert out.startswith(
        "3 records: 3 of ShareGPT\n3 answers in 3 sequences\n1 record cannot be used:\n  chats.jsonl:4"
    )
    assert "data: 3 of 3 chats are longer than max_length (9)" in out or "no answer left to learn" in out
    assert "\nSay no.<|end|>\n<|assistant|>\n>>>no<|end|><<<" in out
    assert ">>>\\x1b[31mred<|end|><<<" in out, "a terminal does not act on the data"


def test_a_tuning_prints_its_plan_and_writes_an_adapter(chats, tmp_path, caplog):
    words = ["tune", chats, "-m", str(BUNDLED), "-o", "out", "--skip-bad"]
    with caplog.at_level(logging.INFO):
        assert run([*words, "--dry-run"], None) == 0
    said = caplog.text
    assert (
        "LoRA of rank 16 on all linear layers" in said and "steps     20 (20 epochs); each has 4 x 128 tokens" in said
    )
    assert "memory  " in said and "time      about" in said and not (tmp_path / "out" / "adapter").exists()
    assert run([*words, "--lora-r", "4", "--set", "max_steps=1", "--set", "threads=1"], None) == 0
    adapter = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert adapter["r"] == 4 and adapter["lora_alpha"] == 8 and "down_proj" in adapter["target_modules"]
    settings = (tmp_path / "out" / "train.toml").read_text()
    assert 'lora_target_modules = ["all-linear"]' in settings and "max_length = 128" in settings
    assert run(["train", str(tmp_path / "out" / "train.toml")], None) == 0, "the written settings are those of the run"


@pytest.mark.parametrize(
    "words, said",
    [
        (["--set", "lr=1"], "unknown field 'lr', did you mean learning_rate?"),
        (["--set", "max_steps=-7"], "max_steps (-7) must be from -1"),
        ([], "chats.jsonl:4 has no text in 'text' and no chat; its keys are body"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_trained(chats, words, said):
    with pytest.raises(ConfigError) as caught:
        run(["tune", "-m", str(BUNDLED), chats, *words], None)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_several_ranks_agree_on_a_plan(chats):
    words = [sys.executable, "-m", "ckdist.cli.main", "tune", "-m", str(BUNDLED), chats, "--skip-bad", "--dry-run"]
    said = subprocess.run([*words, "-dp", "2", "--lr", "0.01"], capture_output=True, text=True, timeout=100)
    assert said.returncode == 0, said.stderr
    assert said.stderr.count("rate      0.01, cosine") == 1 and said.stderr.count("GFLOP/s measured") == 1, said.stderr


def test_little_data_has_more_epochs():
    assert [default_epochs(steps) for steps in (0, 1, 10, 20, 1000)] == [20, 20, 6, 3, 3]
