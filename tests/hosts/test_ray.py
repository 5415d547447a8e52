"""`ckdist launch --on ray`, on a Ray of two nodes: numbers, texts, ends and losses; and without a cluster."""

import json
import signal
import subprocess
import sys
import time

import pytest

from tests.support.launched import launch
from tests.support.launcher import run_ranks
from tests.support.ray_cluster import RayCluster, why_no_hosts, why_not

GENERATE = ("generate", "-p", "def main(", "-n", "12", "--temp", "0", "-t", "1", "--json")
needs_ray = pytest.mark.skipif(bool(why_not() or why_no_hosts()), reason=f"no Ray here: {why_not() or why_no_hosts()}")


@pytest.fixture(scope="module")
def ray():
    with RayCluster() as ray:
        yield ray


def test_without_ray_it_is_one_line():
    done = launch("--on", "ray", "true", env={"RAY_ADDRESS": "127.0.0.1:9"})
    assert "Traceback" not in done.stderr and done.returncode in (1, 2)
    if why_not():
        assert done.returncode == 2 and "pip install 'ckdist[ray]'" in done.stderr
    else:
        assert "no Ray cluster at 127.0.0.1:9" in done.stderr


def test_hosts_are_ray_s_alone():
    done = launch("--on", "ray", "--hosts", "a,b", "true")
    assert done.returncode == 2 and "leave --hosts, --hostfile and --agent out" in done.stderr


@needs_ray
@pytest.mark.timeout(400)
def test_ranks_texts_and_exit_codes(ray):
    alone = run_ranks(1, "-m", "ckdist.cli.main", *GENERATE)
    done = ray.launch("--no-prefix", "ckdist", *GENERATE)  # a rank for each node
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == json.loads(alone.stdout)["token_ids"]
    done = ray.launch("-n", "4", "bash", "-c", "echo $RANK $LOCAL_RANK $(hostname); exit $((RANK == 3 ? 5 : 0))")
    lines = sorted(line for line in done.stdout.splitlines() if line)
    places = [line.split()[1:] for line in lines]
    assert [place[:2] for place in places] == [["0", "0"], ["1", "1"], ["2", "0"], ["3", "1"]], done.stdout
    assert len({place[2] for place in places[:2]}) == 1 and len({place[2] for place in places}) == 2
    assert done.returncode == 5 and "rank 3 of 4 on 1@" in done.stderr


@needs_ray
@pytest.mark.timeout(400)
def test_nothing_is_left_of_a_job_whose_launcher_is_killed(ray):
    """And the nodes are free for the next one."""
    words = ray.hosts.inside(0, sys.executable, "-m", "ckdist.cli.main", "launch", "--on", "ray", "sleep", "1234")
    job = subprocess.Popen(words, env=ray.env())
    sleeping = lambda: [p for p in ray.hosts.processes() if p.name() == "sleep"]
    end = time.monotonic() + 120
    while len(sleeping()) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    assert len(sleeping()) == 2
    job.send_signal(signal.SIGKILL)
    job.wait()
    while sleeping() and time.monotonic() < end:
        time.sleep(0.1)
    assert not sleeping()
    assert ray.launch("true").returncode == 0
