"""Every example runs, is short, and stands in examples/README.md with what it prints."""

import json
import subprocess
import sys

import pytest

from tests.support.launched import LAUNCH
from tests.support.launcher import one_host
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.served import wait_healthy

EXAMPLES = ROOT / "examples"
BUNDLED = str(ROOT / "ckdist/models/bundled")
MAKING = ("bundled_corpus.py", "bundled_model.py")  # make the model that comes with the package
SHORT = sorted(p.name for p in EXAMPLES.glob("*.py") if p.name not in MAKING)


def run(name: str, *words: str, ranks: int = 0, folder=ROOT, **more) -> str:
    """What an example prints, on so many ranks of `ckdist launch`; 0: without it."""
    before = [*LAUNCH, "-n", str(ranks), "--no-prefix"] if ranks else []
    done = subprocess.run(
        [*before, sys.executable, str(EXAMPLES / name), *words],
        env=one_host(), cwd=folder, capture_output=True, text=True, timeout=150, **more,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SHORT)
def test_it_is_short_and_in_the_readme(name):
    assert (EXAMPLES / name).read_text().count("\n") < 60
    assert f"## {name}" in (EXAMPLES / "README.md").read_text()


def test_tensor_parallel():
    one, two = run("tensor_parallel.py"), run("tensor_parallel.py", ranks=2)
    assert one == two and "all_reduce(%mlp.0, axis=tp)" in one and "after 'def main(': '__'" in one


def test_token_parallel_prefill():
    lines = run("token_parallel_prefill.py", "--prompts", "16,32", "--repetitions", "1").splitlines()
    assert len(lines) == 6 and all("times as fast" in line for line in lines[2::3])


def test_expert_parallel():
    text = run("expert_parallel.py")
    assert "rank 1 of the gate projections of layer 0: experts 64 to 128, ffn 0 to 768" in text
    assert text.count("1 Gbit/s: ") == 2 and "whole experts on each host: for a prompt of 512" in text


def test_train_ddp(tmp_path):
    told = {ranks: run("train_ddp.py", "--steps", "4", "--output", f"on{ranks}", ranks=ranks, folder=tmp_path)
            for ranks in (1, 2)}  # fmt: skip
    loss = {ranks: text.split("loss ")[1] for ranks, text in told.items()}
    assert "step 4 on 2 ranks" in told[2] and loss[1] == loss[2], told


def test_train_pipeline(tmp_path):
    """Starts a rank for each stage by itself; one rank has the same losses."""
    told = {}
    for stages in (1, 2):
        words = ["train", str(EXAMPLES / "train_pipeline.toml"), "-pp", str(stages), "--set", "max_steps=2"]
        words += ["--set", "logging_steps=1", "--set", f"output_dir=on{stages}", "--set", "max_length=64", "-v"]
        words += ["--set", 'train_file=["{stdlib}/json/*.py"]']
        command = [sys.executable, "-m", "ckdist.cli.main", *words]
        done = subprocess.run(command, env=one_host(), cwd=tmp_path, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr
        told[stages] = [json.loads(line)["loss"] for line in (tmp_path / f"on{stages}/metrics.jsonl").open()]
    assert "stage 1 of 2 (layers 4 to 7): " in done.stderr and "(12% by formula)" in done.stderr, done.stderr
    assert told[1] == pytest.approx(told[2], rel=1e-5) and len(told[1]) == 2
    assert "## train_pipeline.toml" in (EXAMPLES / "README.md").read_text()


def test_finetune_lora(tmp_path):
    text = run("finetune_lora.py", "-m", BUNDLED, "--steps", "6", folder=tmp_path)
    first, last = (float(part.split()[0]) for part in text.split("loss ")[1].split(" in the first step, "))
    assert last < first and (tmp_path / "finetune_lora/adapter/adapter_model.safetensors").exists()


def test_collectives():
    lines = set(run("collectives.py", ranks=3).splitlines())
    for rank, left in ((0, 2), (1, 0), (2, 1)):
        own = [rank, rank + 100]
        assert f"from the left [{left}]  put to me {[left, left + 100]}  got back {own}" in lines
    assert "all_reduce [4.5, 4.5, 4.5, 4.5]  all_gather [0, 1, 4]" in lines


def test_chat_client():
    port = free_port()
    words = [sys.executable, "-m", "ckdist.cli.main", "serve", "-t", "1", "-c", "256", "--port", str(port)]
    server = subprocess.Popen(words, env=one_host(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_healthy(f"http://127.0.0.1:{port}")
        flags = ("--url", f"http://127.0.0.1:{port}", "--max-tokens", "12")
        assert run("chat_client.py", *flags, "What is a list?", "And a tuple?").count("\n") >= 2
        assert run("chat_client.py", *flags, input="What is a list?\n").strip()
    finally:
        server.terminate()
        server.wait(20)


def test_offline_batch(tmp_path):
    """A second run does what the first has left, here a half-written line and one more prompt."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"id": i, "prompt": f"def f{i}("} for i in range(3)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    words = (str(source), str(output), "-n", "4", "-t", "1")
    assert "2 prompts, 0 done before\n2 answered" in run("offline_batch.py", *words)
    before = output.read_text()
    output.write_text(before + '{"id": 2, "te')
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "3 prompts, 2 done before\n1 answered" in run("offline_batch.py", *words, ranks=2)
    assert output.read_text().startswith(before)
    assert [json.loads(line)["id"] for line in output.read_text().splitlines()] == [0, 1, 2]


def test_new_family():
    assert run("new_family.py").startswith("def main(")
