"""A job that starts again finds the prompts of the job before on disk, on one rank and on two."""

import json
import signal
import subprocess
import sys
import time

import pytest

from tests.support.disk_caches import ask
from tests.support.launcher import environment, run_ranks
from tests.support.paths import ROOT

LLAMA = "llama3"
MODELS = (LLAMA, "deepseek_v3", "qwen35")  # heads, latent vectors, states
LOADED = 144 + 48 + 96  # tokens: all full blocks but the second prompt's first 6, which are then in memory
PROGRAM = ("-m", "tests.support.programs.disk_prompts")


def rows(done) -> dict:
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return {model: more for model, *more in lines}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_new_process_answers_from_disk_with_the_same_bits(ranks, tmp_path):
    before = rows(run_ranks(ranks, *PROGRAM, str(tmp_path / "cache"), *MODELS))
    after = rows(run_ranks(ranks, *PROGRAM, str(tmp_path / "cache"), *MODELS))
    for model in MODELS:
        (first, loaded, stored), (second, loaded_again, _) = before[model], after[model]
        assert first == second and loaded == 0 and stored > 0
        assert loaded_again == LOADED if model != "qwen35" else loaded_again >= 144, model
    if ranks == 2:
        (path,) = [file for file in tmp_path.glob("cache/*/rank-1-of-2.blocks") if LLAMA in about(file)]
        with path.open("r+b") as file:
            file.seek(5)
            file.write(b"damage")
        found, loaded, _ = rows(run_ranks(ranks, *PROGRAM, str(tmp_path / "cache"), LLAMA))[LLAMA]
        assert found == before[LLAMA][0] and loaded < LOADED, "one rank's damage is a miss for all"
    if ranks == 1:
        for model in MODELS:
            assert json.loads(json.dumps(ask(model)[0])) == before[model][0]


def test_stages_load_and_store_between_their_steps(tmp_path):
    words = (*PROGRAM, str(tmp_path), f"{LLAMA}/2")
    first, second = (rows(run_ranks(2, *words))[f"{LLAMA}/2"] for _ in range(2))
    assert first[0] == second[0] and (first[1], second[1]) == (0, LOADED)


def about(file) -> str:
    return (file.parent / "about.json").read_text()


def test_a_job_that_is_killed_while_it_writes_leaves_what_it_had_written(tmp_path):
    process = subprocess.Popen(
        [sys.executable, *PROGRAM, str(tmp_path / "cache")],
        stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    found, stats = ask("llama3", tmp_path / "cache")
    assert found == ask("llama3")[0]
    assert stats["disk_loaded_tokens_total"] == LOADED
    assert stats["disk_damaged_total"] == 0
