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

MODELS = ("llama3", "deepseek_v3", "qwen35")  # heads, latent vectors, states
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
    if ranks == 1:
        for model in MODELS:
            assert json.loads(json.dumps(ask(model)[0])) == before[model][0]


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
