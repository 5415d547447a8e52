"""`ckdist launch --on ray`, on a Ray of two nodes: numbers, texts, ends and losses; and without a cluster."""

import json
import signal
import subprocess

import pytest

from tests.support.generated import GENERATE, tokens_of_one_process
from tests.support.launched import LAUNCH, launch
from tests.support.ray_cluster import RayCluster, why_no_hosts, why_not
from tests.support.served import wait_for

needs_ray = pytest.mark.skipif(bool(why_not() or why_no_hosts()), reason=f"no Ray here: {why_not() or why_no_hosts()}")


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
def test_jobs_on_two_nodes():
    """One test for one cluster."""
    with RayCluster() as ray:
        ranks_of_a_job_whose_launcher_is_killed(ray)
        texts_and_an_exit_code(ray)


def ranks_of_a_job_whose_launcher_is_killed(ray: RayCluster) -> None:
    shell = "echo $RANK $LOCAL_RANK $(hostname); exec sleep 1234"
    command = ray.hosts.inside(0, *LAUNCH, "--on", "ray", "-n", "4", "bash", "-c", shell)
    with subprocess.Popen(command, env=ray.env(), stdout=subprocess.PIPE, text=True) as job:
        try:
            places = sorted(job.stdout.readline().split()[1:] for _ in range(4))
            wait_for(lambda: len(ray.hosts.ranks_named("sleep")) == 4, 60, every=0.1)
        finally:
            job.send_signal(signal.SIGKILL)
    assert [place[:2] for place in places] == [["0", "0"], ["1", "1"], ["2", "0"], ["3", "1"]], places
    assert len({place[2] for place in places[:2]}) == 1 and len({place[2] for place in places}) == 2, places
    wait_for(lambda: not ray.hosts.ranks_named("sleep"), 60, every=0.1)


def texts_and_an_exit_code(ray: RayCluster) -> None:
    """Of a rank for each node; the nodes of the killed job are free."""
    shell = '"$@"; code=$?; exit $((RANK ? code : 5))'
    done = ray.launch("--no-prefix", "bash", "-c", shell, "bash", "ckdist", *GENERATE)
    assert done.returncode == 5 and "rank 0 of 2 on 0@" in done.stderr, done.stderr
    assert json.loads(done.stdout)["token_ids"] == tokens_of_one_process()
