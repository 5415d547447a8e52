"""Ranks on two hosts (network namespaces joined by a wire), over MPI: same numbers, a server, and every way to lose a rank."""

import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tests.hosts import Hosts, why_not
from tests.launcher import ROOT, environment
from tests.served import write_tokenizer

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces here: {why_not()}")

TIMEOUT = 2.0  # --comm-timeout
CKDIST = ("-m", "ckdist.cli.main")
MODEL = ROOT / "tests/golden/llama3"

ASK = """
import sys, time, httpx
url = sys.argv[1]
while httpx.get(url + "/health").status_code != 200:
    time.sleep(0.05)
print(httpx.post(url + "/v1/completions", json=dict(prompt="abc", max_tokens=5, temperature=0, ignore_eos=True), timeout=10).text)
"""


@pytest.fixture
def hosts():
    with Hosts() as hosts:
        yield hosts


class Output:
    """What a job prints, line by line as it comes."""

    def __init__(self, process: subprocess.Popen):
        self.process, self.lines, self.ended = process, [], None
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self) -> None:
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def wait_for(self, pattern: str, count: int = 1, seconds: float = 20) -> str:
        """The first match of `pattern`, once it has come `count` times."""
        end = time.monotonic() + seconds
        while len(found := re.findall(pattern, self.text())) < count:
            assert time.monotonic() < end, f"no {count} of {pattern!r} within {seconds} s in:\n{self.text()}"
            time.sleep(0.02)
        return found[0]

    def text(self) -> str:
        return "".join(self.lines)


@pytest.mark.parametrize("each", [1, 2])
def test_replay_equals_interpreter(hosts, each):
    before = hosts.carried()
    code, output = hosts.run(each, "tests/programs/replay.py")
    assert code == 0, output
    assert output.count("e-08") + output.count("e-07") == 16
    assert hosts.carried() - before > 1_000_000, "the ranks met, but not over the wire"


def test_hosts_are_told_apart(hosts):
    program = "from ckdist.comm.world import start_world; w = start_world(); print('rank', w.rank, w.local_rank, w.local_size, len(set(w.hosts))); w.close()"
    code, output = hosts.run(2, "-c", program)
    assert code == 0 and sorted(re.findall(r"rank .*", output)) == ["rank 0 0 2 2", "rank 1 1 2 2", "rank 2 0 2 2", "rank 3 1 2 2"], output


def test_perplexity_equals_one_hosts(hosts):
    words = [*CKDIST, "perplexity", "-m", str(MODEL), "--token-ids", ",".join(str(i % 200) for i in range(3, 200, 7)), "-t", "1", "-ctk", "f32", "-ctv", "f32", "--json"]
    alone = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=30, cwd=ROOT, env=environment())
    code, output = hosts.run(1, *words)
    assert code == 0 and alone.returncode == 0, output + alone.stderr
    one, two = json.loads(alone.stdout), json.loads(output.splitlines()[-1])
    assert two["tokens"] == one["tokens"] and two["nll"] == pytest.approx(one["nll"], rel=1e-5)


def test_server_answers_and_drains(hosts, tmp_path):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    write_tokenizer(pathlib.Path(folder))
    output = Output(hosts.start(1, *CKDIST, "serve", "-m", str(folder), "--port", "0", "-t", "1", "-c", "64", "--comm-timeout", "5"))
    url = output.wait_for(r"serving .* at (http://\S+)")
    assert "mpi between ranks" in output.text()
    ask = tmp_path / "ask.py"
    ask.write_text(ASK)
    answer = subprocess.run(hosts.inside(0, sys.executable, str(ask), url), capture_output=True, text=True, timeout=30)
    assert '"completion_tokens":5' in answer.stdout, answer.stdout + answer.stderr + output.text()
    ranks = hosts.ranks()
    before = {r: sum(p.cpu_times()[:2]) for r, p in ranks.items()}
    time.sleep(2)
    busy = {r: (sum(p.cpu_times()[:2]) - before[r]) / 2 for r, p in ranks.items()}
    assert busy[1] < 0.05, f"shares of a core while idle: {busy}"
    ranks[0].send_signal(signal.SIGTERM)
    assert output.process.wait(15) == 0, output.text()
    assert hosts.wait_empty(1) == []


@pytest.mark.parametrize("kind", ["busy", "idle"])
@pytest.mark.parametrize("fault", ["kill 1", "stop 1", "stop 0", "link"])
def test_a_lost_rank_ends_the_job(hosts, fault, kind):
    job = hosts.start(1, "tests/programs/steps.py", str(TIMEOUT), kind, "auto")
    output = Output(job)
    output.wait_for(r"rank \d began", 2)
    time.sleep(0.3)
    action, _, lost = fault.partition(" ")
    ranks = hosts.ranks()
    start = time.monotonic()
    if action == "link":
        hosts.set_link("down")
    else:
        ranks[int(lost)].send_signal(signal.SIGKILL if action == "kill" else signal.SIGSTOP)
    survivors = [p for r, p in ranks.items() if str(r) != lost]
    gone, alive = psutil.wait_procs(survivors, TIMEOUT + 5)
    assert not alive, f"after {time.monotonic() - start:.1f} s: {output.text()}"
    if action == "link":
        output.wait_for(r"rank 0: rank 1 (did not reach step \d|has not answered|is lost)|rank 0: MPI reports that rank 1")
        return  # mpirun waits for the other host's daemon for as long as TCP repeats what it sends there
    assert job.wait(10) != 0
    output.thread.join(5)
    if action == "stop":
        assert re.search(rf"rank {1 - int(lost)}: rank {lost} .*(step|steps)\b", output.text()), output.text()
    assert hosts.wait_empty(3) == []
