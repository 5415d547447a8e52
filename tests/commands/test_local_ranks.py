"""Commands that start their ranks themselves: the same answers, one terminal, one end."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from ckdist.cli.command_ranks import run_ranks, wanted_ranks
from ckdist.config.bench_config import BenchConfig
from ckdist.config.chat_config import ChatConfig
from ckdist.config.commands import TrainCommand
from ckdist.config.generate_config import GenerateConfig
from ckdist.config.tuning_commands import TuneCommand
from ckdist.topology import read_machine
from tests.support.generated import GENERATE, tokens_of_one_process
from tests.support.launched import ranks_of, wait_ended
from tests.support.launcher import mpirun, one_host
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.served import wait_healthy
from tests.support.tiny_training import toml
from tests.support.trees.layouts import LAYOUTS, folder_in_memory


@pytest.fixture
def tmp_path():
    with folder_in_memory() as folder:
        yield folder


CKDIST = (sys.executable, "-m", "ckdist.cli.main")


def ckdist(*words: str, before=CKDIST, **more) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*before, *words], env=one_host(), capture_output=True, text=True, timeout=60, cwd=ROOT, **more
    )


@pytest.mark.parametrize("name, nodes", [("one socket", 1), ("two sockets", 2), ("SNC-2", 4)])
def test_a_rank_for_each_node(name, nodes, tmp_path, monkeypatch):
    root = LAYOUTS[name][0].write(tmp_path)
    machine = read_machine(root, environment={})
    assert machine.nodes_in_use() == nodes
    first = tuple(machine.nodes[0].cpus)
    assert read_machine(root, environment={}, cpus=first).nodes_in_use() == 1
    monkeypatch.setattr("ckdist.cli.command_ranks.this_machine", lambda: machine)
    assert wanted_ranks(GenerateConfig()) == nodes and wanted_ranks(BenchConfig(target="comm")) == 1
    assert wanted_ranks(GenerateConfig(tensor_parallel_size=3)) == 3
    assert wanted_ranks(GenerateConfig(tensor_parallel_size=3, pipeline_parallel_size=2)) == 6
    assert wanted_ranks(GenerateConfig(pipeline_parallel_size=2)) == max(2, nodes)
    assert wanted_ranks(ChatConfig(url="http://x:1", tensor_parallel_size=3)) == 1


def test_the_ranks_of_tune():
    tune = lambda **fields: wanted_ranks(TuneCommand(model="m", files=("f",), **fields))
    assert tune() == 1 and tune(data_parallel_size=2, sequence_parallel_size=2) == 4
    assert tune(data_parallel_size=2, set=("tensor_parallel_size = 3", "pipeline_parallel_size=2", "seed=7")) == 12
    assert tune(set=("tensor_parallel_size=-1", "pipeline_parallel_size=x")) == 1  # refused later


def test_the_ranks_of_a_training(tmp_path):
    path = str(toml(tmp_path, tensor_parallel_size=2))
    assert wanted_ranks(TrainCommand(file=path)) == 2
    assert wanted_ranks(TrainCommand(file=path, data_parallel_size=3)) == 6
    assert wanted_ranks(TrainCommand(file=path, data_parallel_size=3, tensor_parallel_size=1)) == 3


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "RANK", "CKDIST_CONNECTIONS"])
def test_a_rank_starts_none(variable, monkeypatch):
    monkeypatch.setenv(variable, "1")
    assert run_ranks(GenerateConfig(tensor_parallel_size=2), ["generate", "-tp", "2"]) is None


def test_the_same_text_and_a_clear_line():
    two = ckdist(*GENERATE, "-tp", "2")
    assert two.returncode == 0 and json.loads(two.stdout)["token_ids"] == tokens_of_one_process()
    piped = ckdist("chat", "-t", "1", "-n", "4", "-tp", "2", input="hello\n")
    assert piped.returncode == 0 and piped.stdout.strip() and not piped.stderr
    wrong = ckdist(*GENERATE, "-tp", "2", "-m", "/no/such.gguf")
    assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 1 and "rank" not in wrong.stderr


def test_under_mpirun_the_size_is_checked():
    launcher = [*mpirun(2), "-m", "ckdist.cli.main"]
    assert ckdist(*GENERATE, "-tp", "2", before=launcher).returncode == 0
    wrong = ckdist(*GENERATE, "-tp", "3", before=launcher)
    assert (
        wrong.returncode == 2 and "--tensor-parallel-size 3 needs that number of ranks, and there are 2" in wrong.stderr
    )


def test_a_training_of_two_replicas(tmp_path):
    done = ckdist("train", str(toml(tmp_path, max_steps=2)), "-dp", "2")
    assert done.returncode == 0 and "training over dp 2" in done.stderr, done.stderr


def start(*words: str, **more) -> subprocess.Popen:
    return subprocess.Popen([*CKDIST, *words], env=one_host(), cwd=ROOT, **more)


def test_a_server_drains_and_a_lost_rank_is_named():
    port = free_port()
    words = ("serve", "--no-restart", "-tp", "2", "--port", str(port), "-t", "1", "-c", "256", "--comm-timeout", "5")
    for number, code in ((signal.SIGTERM, 0), (signal.SIGKILL, 128 + signal.SIGKILL)):
        job = start(*words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            wait_healthy(f"http://127.0.0.1:{port}")
            tree = psutil.Process(job.pid).children(recursive=True)
            listening = {c.laddr.port for p in tree for c in p.net_connections("inet") if c.status == "LISTEN"}
            assert listening == {port}
            if number == signal.SIGTERM:
                job.terminate()
            else:
                ranks_of(job)[1].kill()
            assert job.wait(20) == code
            assert wait_ended(tree, 1) == []
            said = job.stderr.read()
            assert ("rank 1 of 2 was ended by signal 9 (SIGKILL)" in said) == (number == signal.SIGKILL), said
        finally:
            job.kill()
            job.communicate()


class Terminal:
    """A command whose input and output are a terminal."""

    def __init__(self, *words: str):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.execvpe(CKDIST[0], [*CKDIST, *words], {**one_host(), "TERM": "dumb"})
        self.text = ""

    def wait_for(self, *texts: str) -> None:
        """Until these have come, one after the other, behind what was waited for before."""
        deadline = time.monotonic() + 40
        for text in texts:
            while text not in self.text:
                if not select.select([self.fd], [], [], deadline - time.monotonic())[0]:
                    raise AssertionError(f"{text!r} did not come: {self.text!r}")
                self.text += os.read(self.fd, 4096).decode(errors="replace")
            self.text = self.text.partition(text)[2]

    def press(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def interrupt(self, text: str) -> None:
        """Presses Ctrl-C, and after seconds of silence once more: input() of Python does not see a signal that comes
        between its read and its wait.
        """
        for _ in range(4):
            self.press(b"\x03")
            while text not in self.text and select.select([self.fd], [], [], 10)[0]:
                self.text += os.read(self.fd, 4096).decode(errors="replace")
            if text in self.text:
                break
        self.wait_for(text)

    def end(self, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError(f"it did not end: {self.text}")


def test_ctrl_c_on_a_terminal():
    """Drops a line of a chat, which goes on, and drains a server: rank 0 alone decides."""
    chat = Terminal("chat", "-tp", "2", "-t", "1", "-n", "4", "-c", "256")
    chat.wait_for("Ctrl-D leaves")
    chat.press(b"/clear\n/nothing\n")
    chat.wait_for("ends an answer.", "> ")
    chat.press(b"/dropped")
    chat.wait_for("/dropped")
    chat.interrupt("> ")
    chat.press(b"/quit\n")
    assert chat.end(40) == 0

    port = free_port()
    server = Terminal("serve", "-tp", "2", "-t", "1", "-c", "256", "--port", str(port))
    server.wait_for("serving ckdist-bundled")
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    server.press(b"\x03")
    assert server.end(40) == 0
