"""Jobs that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT start, on loopback: same text as one rank, a server, and
jobs that cannot start.
"""

import json
import shutil
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from tests.support.generated import GENERATE, tokens_of_one_process
from tests.support.launcher import environment, run_ranks
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.served import wait_healthy, write_tokenizer
from tests.support.torchrun import finish, secret, start


@pytest.mark.parametrize("size, transport", [(2, "tcp"), (3, "auto")])
def test_same_text_as_one_rank(size, transport, tmp_path):
    port, path = free_port(), secret(tmp_path)
    done = finish(
        [
            start(rank, size, port, *GENERATE, "--transport", transport, CKDIST_JOB_SECRET_FILE=path)
            for rank in reversed(range(size))
        ]
    )[::-1]
    assert [code for code, *_ in done] == [0] * size, done
    assert json.loads(done[0][1])["token_ids"] == tokens_of_one_process()


def test_one_rank_needs_no_secret():
    ((code, out, err),) = finish([start(0, 1, 1, *GENERATE)])
    assert code == 0 and json.loads(out)["token_ids"], err


@pytest.mark.parametrize("size", [2, 3])
def test_server(size, tmp_path):
    folder = write_tokenizer(shutil.copytree(ROOT / "tests/golden/llama3", tmp_path / "model"))
    port, path, http = free_port(), secret(tmp_path), free_port()
    words = ("serve", "-m", str(folder), "--port", str(http), "-t", "1", "-c", "64", "--comm-timeout", "5")
    ranks = [start(rank, size, port, *words, CKDIST_JOB_SECRET_FILE=path) for rank in range(size)]
    try:
        url = f"http://127.0.0.1:{http}"
        wait_healthy(url)
        answer = httpx.post(
            url + "/v1/completions",
            json={"prompt": "abc", "max_tokens": 5, "temperature": 0, "ignore_eos": True},
            timeout=20,
        ).json()
        assert answer["usage"]["completion_tokens"] == 5
        ranks[0].send_signal(signal.SIGTERM)
    finally:
        if ranks[0].poll() is None and sys.exc_info()[0]:
            ranks[0].kill()
        done = finish(ranks, 20)
    assert [code for code, *_ in done] == [0] * size, done


def refused(*ranks: subprocess.Popen, seconds: float = 40) -> list[str]:
    """The one line of each rank's, all of which fail in time."""
    begin = time.monotonic()
    done = finish(list(ranks))
    assert time.monotonic() - begin < seconds and all(code in (1, 2) for code, *_ in done), done
    lines = [[line for line in err.splitlines() if line.startswith("ckdist: ")] for *_, err in done]
    assert all(len(found) == 1 for found in lines), done
    return [found[0] for found in lines]


def test_wrong_secret(tmp_path):
    port = free_port()
    (tmp_path / "other").mkdir()
    zero, one = refused(
        start(0, 2, port, *GENERATE, CKDIST_JOB_SECRET_FILE=secret(tmp_path), CKDIST_START_TIMEOUT="8"),
        start(
            1,
            2,
            port,
            *GENERATE,
            CKDIST_JOB_SECRET_FILE=secret(tmp_path / "other", "quite another secret"),
            CKDIST_START_TIMEOUT="8",
        ),
    )
    assert "rank 1 of 2 did not come" in zero and "job secret" in zero
    assert "does not know this job's secret" in one


def test_missing_rank_and_missing_master(tmp_path):
    port, path = free_port(), secret(tmp_path)
    zero, two = refused(
        *(start(rank, 3, port, *GENERATE, CKDIST_JOB_SECRET_FILE=path, CKDIST_START_TIMEOUT="8") for rank in (0, 2))
    )
    assert "rank 1 of 3 did not come" in zero and "rank 1 of 3 did not come" in two
    (one,) = refused(start(1, 2, free_port(), *GENERATE, CKDIST_JOB_SECRET_FILE=path, CKDIST_START_TIMEOUT="1"))
    assert "rank 0 at 127.0.0.1" in one and "is it started" in one


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_different_world_sizes(sizes, tmp_path):
    port, path = free_port(), secret(tmp_path)
    lines = refused(
        *(start(rank, size, port, *GENERATE, CKDIST_JOB_SECRET_FILE=path) for rank, size in enumerate(sizes))
    )
    assert all(
        f"rank 1 was started with WORLD_SIZE {sizes[1]} and rank 0 with WORLD_SIZE {sizes[0]}" in line for line in lines
    )


def test_mistakes_are_one_line(tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.write_text("a secret of this job alone")
    open_to_all.chmod(0o644)
    cases = [
        ({"CKDIST_JOB_SECRET_FILE": ""}, "CKDIST_JOB_SECRET_FILE"),
        ({"CKDIST_JOB_SECRET_FILE": str(open_to_all)}, "chmod 600"),
        ({"MASTER_PORT": ""}, "MASTER_PORT missing, but RANK, WORLD_SIZE, MASTER_ADDR set"),
        ({"RANK": "two"}, "RANK ('two') must be a whole number"),
        ({"RANK": "2"}, "RANK (2) of WORLD_SIZE (2) is not possible"),
        ({"CKDIST_START_TIMEOUT": "soon"}, "CKDIST_START_TIMEOUT ('soon')"),
        ({"MASTER_ADDR": "192.0.2.1"}, "cannot listen at 192.0.2.1"),
    ]
    path = secret(tmp_path)
    ranks = [start(0, 2, free_port(), *GENERATE, **{"CKDIST_JOB_SECRET_FILE": path, **more}) for more, _ in cases]
    for (_, expected), line in zip(cases, refused(*ranks), strict=True):
        assert expected in line, line


def test_an_impossible_transport_is_the_users_mistake(tmp_path):
    port, path = free_port(), secret(tmp_path)
    lines = refused(
        *(start(rank, 2, port, *GENERATE, "--transport", "mpi", CKDIST_JOB_SECRET_FILE=path) for rank in range(2))
    )
    assert all("--transport mpi does not work: no MPI launcher started this process" in line for line in lines)


def test_torchruns_agent_keeps_its_port(tmp_path):
    with socket.create_server(("127.0.0.1", free_port())) as agent:
        path = secret(tmp_path)
        done = finish(
            [
                start(
                    rank,
                    2,
                    agent.getsockname()[1],
                    *GENERATE,
                    CKDIST_JOB_SECRET_FILE=path,
                    TORCHELASTIC_USE_AGENT_STORE="True",
                )
                for rank in range(2)
            ]
        )
    assert [code for code, *_ in done] == [0, 0] and json.loads(done[0][1])["token_ids"], done


STOPS_WHILE_LOADING = """
import os, signal, sys
from ckdist.comm.bootstrap import connection
from ckdist.comm.world import leave, start_world
from ckdist.errors import CommError
connection.SILENT_SECONDS = 2.0
world = start_world()
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    world.gather(None)
except CommError as error:
    print(f"ckdist: {error}", file=sys.stderr)
    leave(1)
"""


def test_a_rank_that_is_stopped_while_it_loads_is_named(tmp_path):
    variables = {
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "CKDIST_JOB_SECRET_FILE": secret(tmp_path),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", STOPS_WHILE_LOADING],
            env={**environment(), **variables, "RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(3)
    ]
    try:
        for rank in (0, 2):
            _, error = ranks[rank].communicate(timeout=20)
            assert (
                ranks[rank].returncode == 1 and "rank 1 was lost at start-up: it has not been heard of for" in error
            ), error
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_mpi_names_a_rank_that_is_stopped_while_it_loads():
    done = run_ranks(3, "-c", STOPS_WHILE_LOADING, timeout=30)
    assert done.returncode == 1 and "rank 1 was lost at start-up: it has not been heard of for" in done.stderr, (
        done.stderr
    )
