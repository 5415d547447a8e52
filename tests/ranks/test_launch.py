"""`ckdist launch` on one host: what comes out, how it ends, what it leaves behind, and how it goes on after a loss."""

import contextlib
import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.support.generated import GENERATE, tokens_of_one_process
from tests.support.launched import launch, launched, ranks_of, wait_ended
from tests.support.ports import free_port
from tests.support.served import wait_for, wait_healthy
from tests.support.tiny_training import toml

HEALTHY_SECONDS = 90.0  # in which a server answers again: 10 on idle cores, and several times that on busy ones


def shell(text: str) -> tuple[str, str, str]:
    return "bash", "-c", text


def test_ranks_and_their_output():
    done = launch("-n", "3", *shell("echo I am $RANK of $WORLD_SIZE, $LOCAL_RANK here; echo no $RANK >&2; printf end"))
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == sorted(line for r in range(3) for line in (f"[{r}] I am {r} of 3, {r} here", f"[{r}] end"))
    assert sorted(done.stderr.splitlines()) == [f"[{r}] no {r}" for r in range(3)]
    assert launch("-n", "2", "--no-prefix", "echo", "x").stdout == "x\nx\n"


@pytest.mark.parametrize("size", [1, 3])
def test_same_text_as_one_process(size):
    done = launch("-n", str(size), "--no-prefix", "ckdist", *GENERATE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == tokens_of_one_process()


@pytest.mark.parametrize(
    "command, code, reason",
    [
        (shell("exit $((RANK * 3))"), 3, "rank 1 of 2 ended with code 3"),
        (shell("[ $RANK = 0 ] && sleep 20; kill -SEGV $$"), 139, "rank 1 of 2 was ended by signal 11 (SIGSEGV)"),
        # the rank that a signal ends is the reason, though another notices and ends before
        (
            shell("[ $RANK = 0 ] && exit 1; sleep 0.3; kill -KILL $$"),
            137,
            "rank 1 of 2 was ended by signal 9 (SIGKILL)",
        ),
        (("no-such-command", "x"), 127, "has no command 'no-such-command': use its path, or correct PATH"),
        (("/etc/passwd",), 126, "/etc/passwd cannot be started: Permission denied"),
    ],
)
def test_exit_codes(command, code, reason):
    done = launch("-n", "2", "--restarts", "0", *command, timeout=15)
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert line.startswith("ckdist: ") and line.endswith(reason)


def test_a_mistake_is_said_once_and_not_tried_again():
    done = launch("-n", "2", "--restarts", "3", "ckdist", "generate", "-m", "/no/such.gguf")
    assert done.returncode == 2
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["[0] ckdist", "ckdist"], done.stderr
    assert "rank 0 of 2 ended with code 2" in done.stderr


def test_the_mistakes_of_its_own_command_line():
    for words, told in [
        (("-n", "2"), "which command?"),
        (("-n", "2", "--hosts", "-oProxyCommand=x", "echo"), "is not a host"),
        (("-n", "3", "--hosts", "a:1,b:1", "echo"), "3 ranks need 3 slots, and the hosts have 2"),
        (("-n", "2", "--hosts", "a", "--agent", "ssh", "echo"), "must contain {host}"),
        (("-n", "2", "--hosts", "a", "--hostfile", "b", "echo"), "give one"),
        (("-n", "2", "--min-ranks", "3", "echo"), "--min-ranks (3) is more than the 2 ranks"),
        (("-n", "2", "-x", "NOT_SET", "echo"), "-x NOT_SET: that variable is not set here"),
    ]:
        done = launch(*words)
        assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_restarts_have_an_end_and_pauses_that_grow(tmp_path):
    began = time.monotonic()
    done = launch("-n", "2", "--restarts", "2", *shell(f"[ $RANK = 1 ] && echo x >> {tmp_path}/starts; exit 7"))
    assert done.returncode == 7 and time.monotonic() - began > 3
    assert (tmp_path / "starts").read_text() == 3 * "x\n"
    assert "start again in 1 s (restart 1 of 2)" in done.stderr and "in 2 s (restart 2 of 2)" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("ended with code 7, after 2 restarts")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_supervisor(number):
    with launched("-n", "2", *shell("sleep 100 & echo started; exec sleep 100")) as job:
        wait_for(lambda: len(ranks_of(job)) == 2)
        ours = list(ranks_of(job).values())
        wait_for(lambda: all(p.name() == "sleep" for p in ours))
        left = [child for p in ours for child in p.children()] if number == signal.SIGTERM else []
        job.send_signal(number)
        assert job.wait(10) == (143 if number == signal.SIGTERM else -9)
        assert wait_ended(ours + left, 5) == []
        for child in left:
            assert not child.is_running()


def test_ranks_that_do_not_stop_are_killed():
    deaf = shell("trap '' TERM; echo on; sleep 100 & wait; wait")
    with launched("-n", "2", "--stop-timeout", "0.5", *deaf) as job:
        assert sorted(job.stdout.readline() for _ in range(2)) == ["[0] on\n", "[1] on\n"]
        ours = psutil.Process(job.pid).children(recursive=True)
        job.terminate()
        assert job.wait(10) == 137
        assert wait_ended(ours, 1) == []


def test_a_second_signal_hurries():
    with launched("-n", "1", *shell("trap '' TERM INT; echo on; sleep 100 & wait; wait")) as job:
        assert job.stdout.readline() == "[0] on\n"
        for _ in range(3):
            job.send_signal(signal.SIGINT)
            time.sleep(0.2)
        assert job.wait(10) == 137


def test_a_world_is_started_once_and_not_by_what_a_rank_starts():
    program = (
        "from ckdist.comm.world import start_world; import subprocess, sys, os\n"
        "w = start_world(); assert w.gather(w.rank) == [0, 1] and len(set(w.hosts)) == 1\n"
        "words = [sys.executable, '-m', 'ckdist.cli.main', 'generate']\n"
        "if w.rank:\n"
        "    inner = subprocess.run(words, capture_output=True, text=True)\n"
        "    assert inner.returncode == 2 and 'a rank starts its world once' in inner.stderr, inner\n"
        "w.gather(None); w.close()"
    )
    done = launch("-n", "2", "python", "-c", program)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def serving(
    port: int, *flags: str, folder: str | None = None, serve: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen]:
    """`ckdist launch flags... -n 2 ckdist serve`, once it answers."""
    model = ("-m", folder) if folder else ()
    # Its output is read at the end: lines of requests would fill the pipe.
    words = ("serve", "--port", str(port), "-t", "1", "-c", "256", "--comm-timeout", "5", "--no-log-requests")
    with launched("-n", "2", *flags, "ckdist", *words, *model, *serve) as job:
        wait_healthy(f"http://127.0.0.1:{port}")
        yield job


def ask(port: int, tokens: int, **more) -> httpx.Response:
    body = {"prompt": "def main(", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, **more)


@pytest.mark.parametrize(
    "rank, how, flags",
    [(0, signal.SIGKILL, ()), (1, signal.SIGSTOP, ("-pp", "2"))],
    ids=["killed", "stage stopped"],
)
def test_a_server_answers_again_after_a_lost_rank(rank, how, flags):
    """All requests are answered: those under way, and those that come meanwhile."""
    port, ends = free_port(), []

    def keep_asking() -> None:
        while not done.is_set():
            began = time.monotonic()
            try:
                status = ask(port, 60, timeout=HEALTHY_SECONDS).status_code
            except httpx.TransportError:
                status = 0
            ends.append((status, time.monotonic() - began))
            time.sleep(0.1)

    done = threading.Event()
    with serving(port, "--restarts", "1", serve=flags) as job:
        first = ask(port, 8, timeout=30)
        assert first.status_code == 200, first.text
        before = first.json()["choices"][0]["text"]
        clients = [threading.Thread(target=keep_asking, daemon=True) for _ in range(3)]
        for client in clients:
            client.start()
        wait_for(lambda: ends or time.sleep(0.2) is None)
        lost = ranks_of(job)[rank]
        lost.send_signal(how)
        wait_for(lambda: ranks_of(job).get(rank, lost) != lost, HEALTHY_SECONDS, every=0.25)
        after = ask(port, 8, timeout=HEALTHY_SECONDS).json()["choices"][0]["text"]
        done.set()
        for client in clients:
            client.join(HEALTHY_SECONDS)
        assert not any(client.is_alive() for client in clients)
        job.terminate()
        assert job.wait(HEALTHY_SECONDS) == 0
        said = job.stdout.read()
    # on a busy machine the other rank may end before the kernel has ended the killed one
    killed = rf"the engine has ended \(rank ({rank} of 2 was ended by signal 9|{1 - rank} of 2 ended with code 1)"
    assert re.search(killed if how == signal.SIGKILL else "rank 1 has not been heard of", said), said
    assert "it is restarted, and its requests go on" in said
    assert after == before
    assert {status for status, _ in ends} == {200} and max(seconds for _, seconds in ends) < HEALTHY_SECONDS


def test_the_server_alone_listens_and_sigterm_lets_a_stream_end():
    """Neither the supervisor nor a rank opens a port."""
    port, answers = free_port(), []
    with serving(port) as job:
        tree = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
        listening = {c.laddr.port for p in tree for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
        assert listening == {port}
        client = threading.Thread(target=lambda: answers.append(ask(port, 150, timeout=30)))
        client.start()
        metrics = lambda: httpx.get(f"http://127.0.0.1:{port}/metrics").text
        wait_for(lambda: 'ckdist_requests_running{model_name="ckdist-bundled"} 1' in metrics() or answers)
        processes = list(ranks_of(job).values())
        job.terminate()
        assert job.wait(30) == 0
        client.join(10)
    assert answers[0].json()["usage"]["completion_tokens"] == 150
    assert wait_ended(processes, 1) == []


def losses(folder) -> dict[int, float]:
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return {(row := json.loads(line))["step"]: row["loss"] for line in lines}


def test_a_training_goes_on_from_its_last_checkpoint(tmp_path):
    """With the same losses as one that nothing has happened to."""
    fields = {"per_device_train_batch_size": 3, "max_steps": 160, "save_steps": 20}
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = launch("-n", "2", "ckdist", "train", str(toml(tmp_path / "whole", **fields)))
    assert whole.returncode == 0, whole.stderr
    out = tmp_path / "killed" / "out"
    with launched("-n", "2", "--restarts", "1", "ckdist", "train", str(toml(tmp_path / "killed", **fields))) as job:
        wait_for(lambda: list(out.glob("checkpoint-*")), 60)
        ranks_of(job)[1].kill()
        said = job.stdout.read()
        assert job.wait(60) == 0, said
    assert "rank 1 of 2 was ended by signal 9" in said and "steps are done" in said
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 160


def test_sigterm_ends_a_training_with_a_checkpoint(tmp_path):
    path = toml(tmp_path, per_device_train_batch_size=3, max_steps=100000, save_steps=0)
    with launched("-n", "2", "--restarts", "3", "ckdist", "train", str(path)) as job:
        metrics = tmp_path / "out" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text(), 60)
        job.terminate()
        said = job.stdout.read()
        assert job.wait(30) == 130, said
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 1 and "start again" not in said
