"""Ranks on two hosts (network namespaces joined by a link), started by mpirun and as torchrun does: same numbers, a
server, and every way to lose a rank.
"""

import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import read_tensor
from tests.support.hosts import Hosts, kill_left, start, why_not
from tests.support.launcher import environment, run_ranks
from tests.support.paths import ROOT
from tests.support.served import write_tokenizer
from tests.support.tiny_training import toml

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces here: {why_not()}")

TIMEOUT = 2.0  # --comm-timeout
CKDIST = ("-m", "ckdist.cli.main")
MODEL = ROOT / "tests/golden/llama3"

ASK = """
import sys, time, httpx
url = sys.argv[1]
client = httpx.Client()
while client.get(url + "/health").status_code != 200:
    time.sleep(0.05)
body = dict(prompt="abc", max_tokens=5, temperature=0, ignore_eos=True)
print(client.post(url + "/v1/completions", json=body, timeout=10).text)
"""


@pytest.fixture
def hosts():
    with Hosts() as hosts:
        yield hosts


@pytest.mark.parametrize(
    "launcher, each, families",
    [("mpirun", 1, ["llama", "qwen2"]), ("torchrun", 2, ["qwen3", "gemma2"])],
)
def test_replay_equals_interpreter(hosts, launcher, each, families):
    before = hosts.carried()
    output = start(hosts, launcher, each, "tests/support/programs/replay.py", *families)
    assert not any(output.wait(60)), output.text()
    runs = len(families) * (6 if launcher == "mpirun" else 4)
    assert output.text().count("e-08") + output.text().count("e-07") == runs
    assert hosts.carried() - before > 200_000 * len(families), "the ranks met, but not over the wire"


@pytest.mark.parametrize("each", [1, 2])
def test_sums_have_the_same_bits_over_every_transport(hosts, each):
    texts = []
    for launcher, transports in (("mpirun", ["mpi", "tcp"]), ("torchrun", ["tcp"])):
        output = start(hosts, launcher, each, "tests/support/programs/logits.py", *transports)
        assert not any(output.wait(60)), output.text()
        texts += re.findall(r"logits (\w+)", output.text())
    if each == 1:  # the order is that of two ranks on one host
        texts.append(re.search(r"logits (\w+)", run_ranks(2, "tests/support/programs/logits.py", "auto").stdout)[1])
    assert len(texts) == 3 + (each == 1) and len(set(texts)) == 1, texts


def test_hosts_are_told_apart(hosts):
    program = (
        "from ckdist.comm.world import start_world; w = start_world(); "
        "print('rank', w.rank, w.local_rank, w.local_size, len(set(w.hosts))); w.close()"
    )
    code, output = hosts.run(2, "-c", program)
    assert code == 0 and sorted(re.findall(r"rank .*", output)) == [
        "rank 0 0 2 2",
        "rank 1 1 2 2",
        "rank 2 0 2 2",
        "rank 3 1 2 2",
    ], output


def perplexity(*more: str) -> list[str]:
    """The words of a command that scores a short text."""
    ids = ",".join(str(i % 200) for i in range(3, 600, 7))
    exact = ["-t", "1", "-ctk", "f32", "-ctv", "f32"]
    return [*CKDIST, "perplexity", "-m", str(MODEL), "--token-ids", ids, *exact, "--json", *more]


def alone(*more: str) -> dict:
    """What one rank prints."""
    settings = {"capture_output": True, "text": True, "timeout": 30, "cwd": ROOT, "env": environment()}
    done = subprocess.run([sys.executable, *perplexity(*more)], **settings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("stages", ["1", "2"])
def test_perplexity_equals_one_hosts(hosts, stages):
    code, output = hosts.run(1, *perplexity("-pp", stages))
    assert code == 0, output
    one, two = alone(), json.loads(output.splitlines()[-1])
    assert two["tokens"] == one["tokens"] and two["nll"] == pytest.approx(one["nll"], rel=1e-5)
    assert stages == "1" or two == one, "stages have the bits of one rank"


def test_rows_that_a_link_takes_piece_by_piece(hosts):
    """Sockets have room for less than a chunk's rows: ranks push them on while they compute, and while they wait."""
    for host in range(2):
        subprocess.run(hosts.inside(host, "sysctl", "-q", "-w", "net.ipv4.tcp_wmem=4096 4096 4096"), check=True)
    words = perplexity("-pp", "2", "-ub", "80", "--transport", "tcp", "--prefill", "tensor")
    output = start(hosts, "torchrun", 2, *words)
    assert not any(output.wait(60)), output.text()
    # the order of sums is that of two ranks
    expected = run_ranks(2, *perplexity())
    assert expected.returncode == 0, expected.stderr
    assert json.loads(output.wait_for(r"\{.*\}")) == json.loads(expected.stdout.splitlines()[-1])


def idle_share(rank: psutil.Process) -> float:
    """The share of a core that a process takes, over two seconds."""
    before = sum(rank.cpu_times()[:2])
    time.sleep(2)
    return (sum(rank.cpu_times()[:2]) - before) / 2


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_server_answers_and_drains(hosts, launcher, tmp_path):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    write_tokenizer(pathlib.Path(folder))
    more = ["--transport", "mpi"] if launcher == "mpirun" else []
    output = start(
        hosts,
        launcher,
        1,
        *CKDIST,
        "serve",
        "-m",
        str(folder),
        "--port",
        "0",
        "-t",
        "1",
        "-c",
        "64",
        "--comm-timeout",
        "5",
        "--prefill",
        "tensor",  # what auto would measure takes long where cores are busy
        *more,
    )
    url = output.wait_for(r"serving .* at (http://\S+)")
    assert f"2 ranks × 1 thread on 2 hosts ({'mpi' if launcher == 'mpirun' else 'tcp'})" in output.text()
    ask = tmp_path / "ask.py"
    ask.write_text(ASK)
    answer = subprocess.run(hosts.inside(0, sys.executable, str(ask), url), capture_output=True, text=True, timeout=30)
    assert '"completion_tokens":5' in answer.stdout, answer.stdout + answer.stderr + output.text()
    ranks = hosts.ranks()
    busy = []
    while not busy or busy[-1] >= 0.15:  # it is 0.04, and 0.1 if other work has emptied the caches at each look
        assert len(busy) < 3, f"shares of a core while idle: {busy}"
        busy.append(idle_share(ranks[1]))
    ranks[0].send_signal(signal.SIGTERM)
    assert not any(output.wait(40)), output.text()
    assert hosts.wait_empty(1) == []


@pytest.mark.alone
def test_the_faster_transport_is_chosen(hosts):
    """MPI's TCP is told to use little buffers, which the larger exchange notices; the line says what was measured."""
    code, output = hosts.run(
        1, *CKDIST, "generate", "-m", str(MODEL), "-p", "", "-n", "1", "-t", "1", "--comm-timeout", "5", "-v"
    )
    assert code == 2 and "tokenizer" in output, output  # the model has none; the ranks had met by then
    line = re.search(
        r"(mpi|tcp) between hosts, the fastest \((mpi|tcp): (\d+) µs for 16 KiB, ([\d.]+) ms for 1 MiB; "
        r"(mpi|tcp): (\d+) µs for 16 KiB, ([\d.]+) ms for 1 MiB; verbs does not work.*\)",
        output,
    )
    assert line and line[1] == line[2] != line[5], output
    assert int(line[3]) * float(line[4]) < int(line[6]) * float(line[7]) * 1.2


FAULTS = [
    ("mpirun", "mpi", fault, kind) for fault in ("kill 1", "stop 1", "stop 0", "link") for kind in ("busy", "idle")
]
FAULTS += [
    ("torchrun", "tcp", *f)
    for f in (("kill 1", "idle"), ("stop 1", "idle"), ("stop 0", "busy"), ("link", "busy"), ("link", "idle"))
]


@pytest.mark.parametrize("launcher, transport, fault, kind", FAULTS)
def test_a_lost_rank_ends_the_job(hosts, launcher, transport, fault, kind):
    output = start(hosts, launcher, 1, "tests/support/programs/steps.py", str(TIMEOUT), kind, transport)
    output.wait_for(r"rank \d began", 2)
    time.sleep(0.3)
    action, _, lost = fault.partition(" ")
    ranks = hosts.ranks()
    begin = time.monotonic()
    if action == "link":
        hosts.set_link("down")
    else:
        ranks[int(lost)].send_signal(signal.SIGKILL if action == "kill" else signal.SIGSTOP)
    survivors = [p for r, p in ranks.items() if str(r) != lost]
    assert hosts.wait_ended(survivors, TIMEOUT + 5), f"after {time.monotonic() - begin:.1f} s: {output.text()}"
    if action == "link":
        output.wait_for(
            r"rank 0: rank 1 (\(on ckdist\w+\) )?(did not answer|has not been heard of|is lost|does not "
            r"answer)|rank 0: MPI reports that rank 1"
        )
        return  # mpirun waits for the other host's daemon for as long as TCP repeats what it sends there
    if launcher == "torchrun":
        kill_left(ranks[int(lost)])  # a launcher would
    assert all(output.wait(10)), output.text()
    if action == "stop" or launcher == "torchrun":
        place = r"step \d|the wait for a batch" if kind == "busy" else "has not been heard of|died"
        assert re.search(rf"rank {1 - int(lost)}: rank {lost} .*({place}|closed the connection)\b", output.text()), (
            output.text()
        )
    assert hosts.wait_empty(3) == []


@pytest.mark.parametrize("fault", ["kill 3", "stop 3", "stop 0"])
def test_a_lost_rank_is_named_on_every_host(hosts, fault):
    output = start(hosts, "torchrun", 2, "tests/support/programs/steps.py", str(TIMEOUT), "busy", "tcp")
    output.wait_for(r"rank \d began", 4)
    time.sleep(0.3)
    action, _, lost = fault.partition(" ")
    ranks = hosts.ranks()
    ranks[int(lost)].send_signal(signal.SIGKILL if action == "kill" else signal.SIGSTOP)
    assert hosts.wait_ended([p for r, p in ranks.items() if str(r) != lost], TIMEOUT + 5), output.text()
    kill_left(ranks[int(lost)])
    output.wait(10)
    for rank in range(4):
        if str(rank) != lost:
            assert re.search(
                rf"ckdist: rank {rank}: .*rank {lost} (\((pid \d+|on ckdist\w+)\) )?(died|did not answer|closed "
                rf"the connection|has not been heard of)",
                output.text(),
            ), output.text()
    assert hosts.wait_empty(3) == []


def trained(folder: pathlib.Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_training_is_one_hosts(hosts, tmp_path):
    path = toml(tmp_path, per_device_train_batch_size=1, max_steps=3, zero_stage=1)
    code, output = hosts.run(2, *CKDIST, "train", str(path))
    assert code == 0 and "the model is in" in output, output
    alone = [
        *CKDIST,
        "train",
        str(path),
        "--set",
        "per_device_train_batch_size=4",
        "--set",
        "output_dir=" + str(tmp_path / "alone"),
    ]
    done = subprocess.run(
        [sys.executable, *alone], capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert len(trained(tmp_path / "out")) == 3 and trained(tmp_path / "out") == pytest.approx(
        trained(tmp_path / "alone"), rel=1e-5
    )
    stored = [open_checkpoint(tmp_path / name / "model").tensors for name in ("out", "alone")]
    for name in stored[0]:
        one, other = (read_tensor(tensors[name]) for tensors in stored)
        assert np.abs(one - other).max() <= 2**-7 * np.abs(other).max(), name  # a bit of bfloat16


def test_a_training_that_loses_a_rank_ends_and_goes_on(hosts, tmp_path):
    # with MPI's it may end by MPI's words
    path = toml(tmp_path, per_device_train_batch_size=1, max_steps=100000, save_steps=5, transport="tcp")
    output = start(hosts, "mpirun", 1, *CKDIST, "train", str(path))
    output.wait_for("saved .*checkpoint-5", seconds=40)
    lost = hosts.ranks()[1]
    lost.kill()
    began = time.monotonic()
    assert any(output.wait(15)), output.text()
    named = [
        f"ckdist: rank 0: rank 1 (on {hosts.namespaces[1]}) ",
        f"rank 1 with PID {lost.pid} on node",
    ]  # or mpirun's
    assert time.monotonic() - began < 10 and any(words in output.text() for words in named), output.text()
    assert hosts.wait_empty(2) == []
    done = max(int(p.name.split("-")[1]) for p in (tmp_path / "out").glob("checkpoint-*"))
    code, said = hosts.run(1, *CKDIST, "train", str(path), "--set", f"max_steps={done + 2}")
    assert code == 0 and f"checkpoint-{done}: {done} of {done + 2} steps are done" in said, said
