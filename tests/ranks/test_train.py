"""A training end to end over the numpy executable: the same curve on any number of ranks, going on, faults, and what
comes out.
"""

import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import ckdist
from ckdist import figure
from ckdist.comm.world import SingleWorld
from ckdist.engine.load_model import BUNDLED
from ckdist.errors import CapacityError, CommError, ConfigError, EngineError, ModelFileError
from ckdist.train import report
from ckdist.train import training_checkpoint as saved
from ckdist.train.batch import PackedBatch
from ckdist.train.checkpoint_parts import Part, write_parts
from ckdist.train.trainer import train
from ckdist.train.training_checkpoint import TrainState, verify
from ckdist.weights.checkpoint import open_checkpoint
from tests.support.curves import tensors
from tests.support.launcher import environment, mpirun, run_ranks
from tests.support.reference_training import reference_executable
from tests.support.thread_ranks import run_threads
from tests.support.tiny_training import config, text, toml


def curve(c, ranks: int = 1, **more) -> list:
    """The reports of every step."""
    reports: list = []
    run_threads(ranks, lambda world: train(c, reports.append if world.rank == 0 else None, world=world, **more))
    return reports


def weights(c, step: int) -> dict[str, np.ndarray]:
    """And the optimizer's state."""
    return tensors(pathlib.Path(c.output_dir) / f"checkpoint-{step}")


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """Eight steps on one rank: the configuration and the reports."""
    c = config(tmp_path_factory.mktemp("eight"), eval_steps=4)
    return c, curve(c)


def test_it_learns_and_says_so(eight):
    c, reports = eight
    assert [r.step for r in reports] == list(range(1, 9)) and not any(r.skipped for r in reports)
    assert reports[-1].loss < reports[0].loss - 0.4
    assert (
        reports[-1].eval_loss == pytest.approx(reports[-1].loss, abs=0.6)
        and reports[3].eval_loss > reports[-1].eval_loss
    )
    lines = [json.loads(line) for line in (pathlib.Path(c.output_dir) / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [r.loss for r in reports]
    assert reports[-1].tokens_per_second > 0 and reports[-1].gflops > 0


def test_speeds_count_all_tokens_and_say_how_many_have_a_target(tmp_path, caplog):
    def chats(step, rank, size):  # three of twenty tokens, of which five are learned, in a batch of 64 or more
        targets = np.tile(np.where(np.arange(20) < 15, -1, 7), 3)
        return [PackedBatch(np.full(60, 5), targets, np.array([0, 20, 40, 60]))]

    with caplog.at_level("INFO"):
        report = curve(config(tmp_path, max_steps=1), batches=chats)[-1]
    assert (report.tokens, report.all_tokens) == (15, 60)
    assert report.tokens_per_second == pytest.approx(4 * report.target_tokens_per_second)
    assert (
        f"{report.tokens_per_second:.0f} tokens/s ({report.target_tokens_per_second:.0f} with a target)" in caplog.text
    )


@pytest.mark.parametrize(
    "ranks, fields",
    [
        (2, {"per_device_train_batch_size": 3}),
        (3, {"per_device_train_batch_size": 2}),
        (2, {"per_device_train_batch_size": 3, "zero_stage": 1}),
        (3, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "zero_stage": 1}),
    ],
)
def test_the_same_curve_on_any_number_of_ranks(eight, tmp_path, ranks, fields):
    c = config(tmp_path, eval_steps=4, **fields)
    for one, other in zip(eight[1], curve(c, ranks), strict=True):
        assert other.tokens == one.tokens
        assert other.loss == pytest.approx(one.loss, rel=1e-5) and other.grad_norm == pytest.approx(
            one.grad_norm, rel=1e-4
        )
        assert (other.eval_loss is None) == (one.eval_loss is None) and (
            one.eval_loss is None or other.eval_loss == pytest.approx(one.eval_loss, rel=1e-5)
        )


@pytest.mark.parametrize("ranks, zero", [(1, 0), (2, 1)])
def test_going_on_gives_the_bits_of_never_having_stopped(tmp_path, ranks, zero):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    fields = {"per_device_train_batch_size": 6 // ranks, "zero_stage": zero}
    whole, parts = config(tmp_path / "whole", **fields), config(tmp_path / "parts", **fields)
    expected = curve(whole, ranks)
    reports = curve(parts, ranks, should_stop=stop_after(3))
    assert len(reports) == 3 and verify(tmp_path / "parts" / "out" / "checkpoint-3").step == 3
    reports += curve(parts, ranks)
    assert [(r.step, r.loss, r.grad_norm) for r in reports] == [(r.step, r.loss, r.grad_norm) for r in expected]
    for name, array in weights(whole, 8).items():
        np.testing.assert_array_equal(array, weights(parts, 8)[name], err_msg=name)
    lines = (tmp_path / "parts" / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 9))


def stop_after(steps: int):
    """should_stop for several ranks as threads: true once any rank has been asked in step `steps`."""
    asked = threading.local()

    def stop() -> bool:
        asked.count = getattr(asked, "count", 0) + 1
        return asked.count >= steps

    return stop


def test_going_on_with_another_number_of_ranks(eight, tmp_path):
    c = config(tmp_path, eval_steps=4)
    curve(c, should_stop=stop_after(5))
    again = config(tmp_path, eval_steps=4, per_device_train_batch_size=2, zero_stage=1)
    for one, other in zip(eight[1][5:], curve(again, 3), strict=True):
        assert (other.step, other.tokens) == (one.step, one.tokens) and other.loss == pytest.approx(one.loss, rel=1e-5)


def test_a_corrupt_checkpoint_is_refused_and_the_one_before_offered(eight, tmp_path):
    own = {"train_file": (text(tmp_path),)}
    c = config(tmp_path, max_steps=9, **own)
    curve(c, should_stop=stop_after(8))
    out = tmp_path / "out"
    assert sorted(p.name for p in out.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-8"]
    with open(out / "checkpoint-8/training/rank-0.safetensors", "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\x55")
    with pytest.raises(
        ModelFileError,
        match=r"checkpoint-8 is corrupt: the SHA-256 of training/rank-0.safetensors.*--set resume=.*checkpoint-4",
    ):
        curve(c)
    reports = curve(config(tmp_path, max_steps=9, resume=str(out / "checkpoint-4"), **own))
    assert [r.step for r in reports] == [5, 6, 7, 8, 9] and reports[3].loss == pytest.approx(eight[1][7].loss, rel=0.1)
    assert verify(out / "checkpoint-8").step == 8
    with pytest.raises(ConfigError, match=r"resume is never, and .* has checkpoint-9"):
        curve(config(tmp_path, resume="never", **own))
    with pytest.raises(ConfigError, match="was trained with seed 42, and seed is 1"):
        curve(config(tmp_path, max_steps=9, seed=1, **own))
    (tmp_path / "99.txt").write_text("another text")
    with pytest.raises(ConfigError, match="was trained on other text"):
        curve(config(tmp_path, max_steps=10, **own))


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path):
    c = config(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill(report) -> None:
        while report.step == 5 and "ckdist-checkpoint" in {thread.name for thread in threading.enumerate()}:
            time.sleep(0.01)
        if report.step == 7:  # checkpoint-4 is complete
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))

    try:
        with pytest.raises(
            EngineError,
            match=r"checkpoint-8 could not be written: files may not be so large; the last good one is .*checkpoint-4",
        ):
            train(c, fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if "checkpoint" in p.name) == ["checkpoint-4"]
    assert [r.step for r in curve(c)] == [5, 6, 7, 8]


@pytest.mark.parametrize(
    "kilobytes, said",
    [
        (1000, r"checkpoint-6 could not be written: the disk is full; the last good one is .*checkpoint-4"),
        (20, "token cache .* could not be written: No space left on device; make room"),
    ],
)
def test_a_disk_that_is_really_full(tmp_path, kilobytes, said):
    path, out = toml(tmp_path, save_steps=2), tmp_path / "out"
    out.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(out)], capture_output=True
        ).returncode
    ):
        pytest.skip("needs to mount a small file system")
    command = [
        sys.executable,
        "-m",
        "ckdist.cli.main",
        "train",
        str(path),
        "--set",
        f"tokenizer_name={BUNDLED}",
        "--set",
        "model_config.vocab_size=4096",
    ][: 5 if kilobytes > 100 else None]
    train_it = lambda: subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    try:
        done = train_it()
        assert done.returncode == 1 and re.search(said, done.stderr) and "Traceback" not in done.stderr, done.stderr
        assert not list(out.glob(".*/*"))
        subprocess.run(["mount", "-o", "remount,size=20m", str(out)], check=True)
        done = train_it()
        assert done.returncode == 0 and ("checkpoint-4: 4 of 8 steps are done" in done.stderr) == (kilobytes > 100), (
            done.stderr
        )
    finally:
        subprocess.run(["umount", "-l", str(out)], check=True)


def test_what_fails_on_one_rank_is_told_by_all(tmp_path):
    c = config(tmp_path, per_device_train_batch_size=3)

    def body(world):
        def fail(report):
            if world.rank == 1 and report.step == 3:
                raise ValueError("my own mistake")

        with pytest.raises((ValueError, CommError), match="my own mistake"):
            train(c, fail, world=world)

    began = time.monotonic()
    run_threads(2, body)
    assert time.monotonic() - began < 20


def save_and_die(out: pathlib.Path, step: int, at: int) -> bool:
    """A process that saves checkpoint `step` and is killed at the `at`-th change of the file system; whether it came
    through.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    left = [at]

    def count(event, arguments):
        if event in ("os.rename", "os.mkdir", "open", "os.rmdir", "os.remove") and "checkpoint-" in str(arguments[0]):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(count)
        folder = saved.Folder(out)
        part = Part("weights.w", (1000,), ((0, 1000),), 0, np.zeros(1000, np.float32))
        folder.finish(TrainState(step=step), write_parts(folder.begin(step), 0, [part]), keep=1)
        os._exit(0)
    finally:
        os._exit(1)


def test_killed_at_any_point_of_saving_the_last_good_one_is_there(tmp_path):
    step, kills = 1, 0
    assert save_and_die(tmp_path, step, 1000)
    for at in range(1, 1000):
        came_through = save_and_die(tmp_path, step + 1, at)
        found = saved.Folder(tmp_path)
        assert found.steps() and found.steps()[-1] in (step, step + 1)
        assert not list(tmp_path.glob(".checkpoint-*")), "the next run clears up"
        for there in found.steps():
            assert verify(found.at(there)).step == there
        step = found.steps()[-1]
        found.close()
        if came_through:
            break
        kills += 1
    assert kills >= 8 and came_through


def test_a_step_that_is_not_finite_is_skipped_counted_and_told(tmp_path, caplog, monkeypatch):
    c = config(tmp_path, max_steps=4)

    class Broken:
        gradient_share = None

        def __init__(self, *arguments):
            self.inner, self.calls = reference_executable(*arguments), 0
            self.parameters, self.gradients, self.loss, self.balance, self.waited, self.zero_grad, self.flush = (
                getattr(self.inner, n)
                for n in ("parameters", "gradients", "loss", "balance", "waited", "zero_grad", "flush")
            )

        def forward_backward(self, batch, reduce, *place):
            self.calls += 1
            loss = self.inner.forward_backward(batch, reduce, *place)
            if self.calls == 2:
                self.gradients.flat[5] = np.inf
            return loss

    with caplog.at_level("INFO"):
        monkeypatch.setattr("ckdist.train.trainer.native_executable", Broken)
        reports = curve(c)
    assert [r.skipped for r in reports] == [False, True, False, False]
    state = verify(tmp_path / "out" / "checkpoint-4")
    assert (state.skipped_steps, state.updates) == (1, 3)
    assert "step 2 is skipped: its gradient's norm is inf" in caplog.text and "1 steps were skipped" in caplog.text


def started(path) -> subprocess.Popen:
    """`ckdist train path`, whose lines of progress can be read."""
    words = [sys.executable, "-m", "ckdist.cli.main", "train", str(path)]
    return subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True)


def test_a_signal_before_the_first_step_ends_it_at_once(tmp_path):
    """While text is tokenised, which can take hours: there is nothing to save."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"".join(b"word %d of a long text\n" % i for i in range(80_000)))
    path = toml(tmp_path, max_steps=100000, train_file=str(text))
    job = started(path)
    try:
        while not list(tmp_path.glob("out/cache/.tokens-*")):
            assert job.poll() is None
            time.sleep(0.01)
        job.send_signal(signal.SIGINT)
        said = job.communicate(timeout=30)[1]
    finally:
        job.kill()
    assert (
        job.returncode == 130
        and said == ""
        and not list(tmp_path.glob("out/cache/*"))
        and not list(tmp_path.glob("out/checkpoint*"))
    )


def test_a_signal_ends_the_training_after_its_step_with_a_checkpoint(tmp_path):
    path = toml(tmp_path, max_steps=100000, save_steps=0)
    job = started(path)
    try:
        for line in job.stderr:
            if line.startswith("step 3 "):
                job.send_signal(signal.SIGTERM)
                break
        said = job.communicate(timeout=30)[1]
    finally:
        job.kill()
    (found,) = (tmp_path / "out").glob("checkpoint-*")
    assert job.returncode == 130 and verify(found).step >= 3 and f"saved {found}" in said


def test_tensorboard_on_request(tmp_path):
    pytest.importorskip("tensorboardX")
    train(config(tmp_path, max_steps=2, report_to=("tensorboard",)))
    assert sum(path.stat().st_size for path in (tmp_path / "out" / "tensorboard").iterdir()) > 100


def test_the_picture_has_the_losses_of_training_and_validation(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "new_figure", figure.new_figure)  # tests/conftest.py leaves pictures out
    train(config(tmp_path, max_steps=2, eval_steps=1))
    picture = ET.parse(tmp_path / "out" / report.PICTURE).getroot()
    assert picture.tag.endswith("svg") and {"line2d_1", "legend_1"} <= {element.get("id") for element in picture.iter()}


def test_two_trainings_do_not_share_a_folder(tmp_path):
    c = config(tmp_path)
    folder = saved.Folder(pathlib.Path(c.output_dir))
    with pytest.raises(ConfigError, match="another training writes to"):
        train(c)
    folder.close()


def test_what_comes_out_is_a_model_that_can_be_trained_on(eight, tmp_path):
    out = pathlib.Path(eight[0].output_dir) / "model"
    checkpoint = open_checkpoint(out)
    assert len(checkpoint.spec.layers) == 2 and checkpoint.tensors["model.norm.weight"].type == 30
    more = config(tmp_path, model_config={}, model_name_or_path=str(out), max_steps=2)
    assert curve(more)[0].loss < eight[1][-1].loss + 0.3
    again = ckdist.LLM(str(tmp_path / "out" / "model"), threads=1)
    assert again.generate(["1 and 2 are"], ckdist.SamplingParams(max_tokens=3, temperature=0))


def test_transformers_loads_what_comes_out(eight):
    """Needs the `golden` extra."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    out = f"{eight[0].output_dir}/model"
    peer, tokenizer = (
        transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32),
        transformers.AutoTokenizer.from_pretrained(out),
    )
    with ckdist.LLM(out, threads=1) as own:
        ids = own.tokenizer.encode("1 and 2 are 3")
        assert tokenizer("1 and 2 are 3")["input_ids"] == ids
        (scored,) = own.generate([ids], ckdist.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    with torch.no_grad():
        expected = torch.log_softmax(peer(torch.tensor([ids])).logits[0], -1)[range(len(ids) - 1), ids[1:]]
    # ckdist multiplies in bfloat16
    np.testing.assert_allclose([entry[0] for entry in scored.prompt_logprobs[1:]], expected.numpy(), atol=0.02)


def test_ranks_from_the_command_line_and_own_batches(tmp_path):
    path = toml(tmp_path, per_device_train_batch_size=3, max_steps=3)
    done = run_ranks(2, "-m", "ckdist.cli.main", "train", str(path), "--set", "max_steps=2", timeout=120)
    assert done.returncode == 0, done.stderr
    assert "step 2 of 2 loss" in done.stderr and "the model is in" in done.stderr
    (tmp_path / "own.py").write_text(OWN)
    own = run_ranks(2, str(tmp_path / "own.py"), str(path), str(tmp_path / "own"), timeout=120)
    assert own.returncode == 0, own.stderr
    assert own.stdout.count("steps 3 tokens 62") == 2, own.stdout


OWN = """
import dataclasses, sys
import numpy as np
import ckdist
from ckdist.train.batch import PackedBatch
from ckdist.train.config import load_config
from ckdist.comm.bootstrap.launchers import MPI_VARIABLES
import os
first = os.environ["OMPI_COMM_WORLD_RANK"] == "0"

def batches(step, rank, size):
    ids = np.random.default_rng((step, rank)).integers(1, 200, 32)
    return [PackedBatch(ids, np.append(ids[1:], -1), np.array([0, 32]))]

reports = []
config = dataclasses.replace(load_config(sys.argv[1]), output_dir=sys.argv[2])
ckdist.train(config, reports.append, batches if first else None)
print(f"steps {len(reports)} tokens {reports[-1].tokens}\\n", end="", flush=True)
"""


def test_a_killed_rank_ends_the_job_and_the_next_goes_on(tmp_path):
    path = toml(tmp_path, per_device_train_batch_size=3, max_steps=100000, save_steps=2)
    words = [*mpirun(2), "-m", "ckdist.cli.main", "train", str(path)]
    job = subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not list((tmp_path / "out").glob("checkpoint-*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        pids = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(pids[-1]), signal.SIGKILL)
        began = time.monotonic()
        said = job.communicate(timeout=30)[1]
        assert time.monotonic() - began < 10 and job.returncode == 128 + signal.SIGKILL, said
        # who is first: the launcher or rank 0
        assert re.search(rf"rank 1 (with PID|\(pid) {pids[-1]}", said) and "signal 9" in said, said
    finally:
        job.kill()
    steps = max(int(p.name.split("-")[1]) for p in (tmp_path / "out").glob("checkpoint-*"))
    done = run_ranks(2, "-m", "ckdist.cli.main", "train", str(path), "--set", f"max_steps={steps + 1}", timeout=120)
    assert done.returncode == 0 and f"checkpoint-{steps}: {steps} of {steps + 1} steps are done" in done.stderr, (
        done.stderr
    )


def test_memory_is_asked_before_loading_and_bound_as_in_serving(tmp_path, monkeypatch):
    """What does not fit is one line with the sum, before loading. A rank binds its memory before it loads."""
    events = []
    monkeypatch.setattr("ckdist.train.trainer.bind_memory", lambda placement: events.append("bound"))
    made = lambda *_: events.append("loaded") or pytest.fail("nothing fits")
    monkeypatch.setattr("ckdist.train.trainer.native_executable", made)
    monkeypatch.setattr("ckdist.train.training_memory.free_memory", lambda ranks: 50_000)
    with pytest.raises(
        CapacityError,
        match=r"training needs 2.2 MiB on each rank \(.* trained weights, .*1.2 MiB activations, "
        r".*48\.8 KiB are free for it \(0\.25 GiB of memory less 0\.25 GiB for everything else\): ",
    ):
        train(config(tmp_path), world=SingleWorld())
    assert events == ["bound"]
