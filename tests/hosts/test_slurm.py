"""Jobs of a Slurm of one node: srun without PMIx, and the batch scripts of launch/slurm."""

import json

import httpx
import pytest

from tests.support.generated import GENERATE, tokens_of_one_process
from tests.support.launcher import one_host
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.served import healthy, wait_for
from tests.support.slurm import Slurm, why_not
from tests.support.tiny_training import toml
from tests.support.torchrun import secret

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no Slurm here: {why_not()}")


EVERY = 0.3  # seconds between two calls of squeue


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def env(tmp_path):
    return {**one_host(), "HOME": str(tmp_path), "CKDIST_START_TIMEOUT": "60"}


def test_the_tasks_of_srun_are_ranks(slurm, env, tmp_path):
    words = ("srun", "-n", "2", "--overcommit", "--mpi=none", "--cpu-bind=none", "ckdist", *GENERATE)
    done = slurm.run(*words, env={**env, "CKDIST_JOB_SECRET_FILE": secret(tmp_path)}, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == tokens_of_one_process()
    single = slurm.run("srun", "-n", "1", "ckdist", *GENERATE, env=env, cwd=ROOT)
    assert json.loads(single.stdout)["token_ids"] == tokens_of_one_process(), single.stderr


def submit(slurm, env, *words: str, output) -> str:
    flags = ("--parsable", "--overcommit", "--ntasks-per-node=2", "--export=ALL", f"--output={output}")
    done = slurm.run("sbatch", *flags, *words, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def state(slurm, job: str) -> str:
    return slurm.run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T %r").stdout.strip()


def read(path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_server_and_its_drain(slurm, env, tmp_path):
    port, output = free_port(), tmp_path / "out"
    flags = ("--port", str(port), "-t", "1", "-c", "256")
    model = str(ROOT / "ckdist/models/bundled")
    job = submit(slurm, env, str(ROOT / "launch/slurm/serve.sbatch"), model, *flags, output=output)
    wait_for(lambda: healthy(f"http://127.0.0.1:{port}") or state(slurm, job).startswith("FAILED"), 60, EVERY)
    body = {"prompt": "def", "max_tokens": 4, "temperature": 0}
    keys = tmp_path / ".ckdist-api-keys"
    header = {"Authorization": f"Bearer {keys.read_text().strip()}"}
    url = f"http://127.0.0.1:{port}/v1/completions"
    assert httpx.post(url, json=body, headers=header, timeout=30).status_code == 200
    assert httpx.post(url, json=body).status_code == 401 and oct(keys.stat().st_mode & 0o777) == "0o600"
    assert oct((tmp_path / f".ckdist-job-{job}").stat().st_mode & 0o777) == "0o600"
    slurm.run("scancel", "--signal=TERM", "--batch", job)
    wait_for(lambda: not state(slurm, job).startswith(("RUNNING", "COMPLETING")), 40, EVERY)
    assert state(slurm, job).startswith("COMPLETED"), state(slurm, job) + output.read_text()
    assert not (tmp_path / f".ckdist-job-{job}").exists() and "2 ranks" in output.read_text()


def test_a_training_saves_a_checkpoint_and_is_queued_again(slurm, env, tmp_path):
    fields = {"per_device_train_batch_size": 3, "max_steps": 400000, "save_steps": 0, "logging_steps": 100}
    output, metrics = tmp_path / "log", tmp_path / "out" / "metrics.jsonl"
    job = submit(slurm, env, str(ROOT / "launch/slurm/train.sbatch"), str(toml(tmp_path, **fields)), output=output)
    # while ranks compute on a busy machine, a single squeue can take twenty seconds
    wait_for(lambda: (metrics.exists() and metrics.read_text()) or "rror" in read(output), 60, 0.1)
    assert metrics.exists(), state(slurm, job) + read(output)
    slurm.run("scancel", "--signal=TERM", "--batch", job)
    wait_for(lambda: list((tmp_path / "out").glob("checkpoint-*")), 60, 0.1)
    wait_for(lambda: not state(slurm, job).startswith(("RUNNING", "COMPLETING")), 60, EVERY)
    assert state(slurm, job).startswith("PENDING"), state(slurm, job) + output.read_text()  # Slurm waits two minutes
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 1
    slurm.run("scancel", job)
