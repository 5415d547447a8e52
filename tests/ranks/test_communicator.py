"""One interface, every transport: right against numpy bit by bit, whatever joins the ranks; and what happens when a
rank is lost.
"""

import contextlib
import os
import re
import secrets
import signal
import socket
import struct
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from ckdist.cli.bench_comm import Stopwatch
from ckdist.comm.bootstrap.handshake import Listener, Purpose, connect, job_secret, read_secret
from ckdist.comm.bootstrap.sockets import DATA, HEARTBEATS, connect_ranks
from ckdist.comm.bootstrap.tcp_world import TcpWorld
from ckdist.comm.communicator import open_communicator
from ckdist.errors import CommError, ConfigError
from tests.support import launcher
from tests.support.collective_jobs import WRONG_CALLS, options, start_program
from tests.support.launcher import mpirun, run_ranks
from tests.support.pairs import pairs
from tests.support.ports import free_port
from tests.support.programs import collectives
from tests.support.thread_ranks import run_threads

RANKS = (2, 3, 4, 5, 7)


def largest(transport: str, ranks: int) -> int:
    """Elements: several chunks of shared memory with few and with many ranks, and little on the slower rest."""
    return 300_001 if ranks == 2 or (transport, ranks) == ("shared", 5) else 5000


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("transport", ["shared", "tcp", "hybrid", "hosts without shared memory"])
def test_every_operation(transport, ranks):
    """Ranks as threads. Each part checks against numpy, which fixes the bits for all transports alike."""
    hosts, opened = options(transport, ranks)
    run_threads(hosts, lambda world: collectives.battery(world, largest(transport, ranks), **opened))


def test_33_mib_over_hosts():
    run_threads(
        "aab",
        lambda world: collectives.battery(
            world, collectives.LARGE_BYTES, (collectives.large,), timeout=60, transport="tcp"
        ),
    )


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_nan_and_extremes(transport):
    hosts, opened = options(transport, 2)

    def body(world):
        c = open_communicator(world, arena_bytes=1 << 26, **opened)
        x = np.zeros(256, np.float32)
        x[world.rank] = np.nan
        x[4 + world.rank] = np.inf
        for op in ("max", "min", "sum"):
            y = c.all_reduce(x, op)
            assert np.isnan(y[:2]).all() and not np.isnan(y[2:]).any()
            assert np.isinf(y[4:6]).all() == (op != "min")
        tiny = np.full(70, 3, np.uint16)  # bfloat16 far below the normal range
        assert (c.all_reduce(tiny, dtype="bfloat16") == 0).all()
        c.barrier()

    run_threads(hosts, body)


def test_a_round_trip_that_cannot_be_measured_is_an_error():
    """It was None once, and what computed with it failed elsewhere."""

    def body(world):
        c = open_communicator(world, "tcp", arena_bytes=1 << 26, timeout=5)
        with pytest.raises(ConfigError, match="no memory is shared here"):
            Stopwatch(c).round_trip()
        c.barrier()

    run_threads(2, body)


def test_what_cannot_be():
    def body(world):
        c = open_communicator(world, arena_bytes=1 << 26, timeout=5)
        with pytest.raises(ConfigError, match="float64 cannot be exchanged"):
            c.all_reduce(np.zeros(3))
        with pytest.raises(ConfigError, match="7 elements cannot be sharded evenly over 2 ranks"):
            c.reduce_scatter(np.zeros(7, np.float32))
        with pytest.raises(ConfigError, match="bytes cannot be reduced"):
            c.all_reduce(np.zeros(3, np.uint8))
        with pytest.raises(ConfigError, match="bytes cannot be reduced"):
            c.start.all_reduce(np.zeros(3, np.uint8)).wait()
        with pytest.raises(ConfigError, match="rank 2"):
            c.send(np.zeros(3), 2)
        with pytest.raises(ConfigError, match="'average' is not a reduction"):
            c.all_reduce(np.zeros(3, np.float32), "average")
        four = np.zeros(4, np.float32)
        with pytest.raises(ConfigError, match="bfloat16 travels in arrays of uint16, not of float32"):
            c.all_reduce(four, dtype="bfloat16")
        with pytest.raises(ConfigError, match="an array of float32 was called float16"):
            c.all_reduce(four, dtype="float16")
        with pytest.raises(ConfigError, match=r"counts \[1, 2\] must be 2 numbers, none negative, and 4 in all"):
            c.reduce_scatter(four, [1, 2])
        with pytest.raises(ConfigError, match=f"rank {world.rank} sends itself 2 elements and receives 1"):
            c.all_to_all(four, [2, 2], [1, 1])
        with pytest.raises(ConfigError, match="out must be a contiguous array of 4 float32, not of 3 float32"):
            c.all_reduce(four, out=np.zeros(3, np.float32))
        with pytest.raises(ConfigError, match="1024 is not a tag or a window; use 0 to 1023"):
            c.send(four, 1 - world.rank, 1024)
        window = c.window(c.allocate(4))
        with pytest.raises(ConfigError, match=r"16 bytes at offset 4 lie beyond rank \d's window 0 of 16 bytes"):
            window.put(four, 1 - world.rank, 4).wait()
        c.barrier()
        with pytest.raises(CommError, match="another collective"):
            c.all_reduce(np.zeros(3 + world.rank, np.float32))
        with pytest.raises(CommError):
            c.barrier()

    run_threads(2, body)


@pytest.mark.parametrize("wrong", WRONG_CALLS)
@pytest.mark.parametrize("hosts", ["aaa", "abb", "abc"])
def test_another_call_is_an_error(hosts, wrong):
    """Never a wrong result, and all are told: at once, but for messages that nobody sends."""

    def body(world):
        c = open_communicator(world, timeout=2 if (hosts, wrong) == ("abc", "root") else 20, arena_bytes=1 << 26)
        with pytest.raises(CommError, match=r"called another collective|bytes where|did not answer within 2 s"):
            WRONG_CALLS[wrong][world.rank == 2](c, np.zeros(1000, np.float32))
            c.barrier()
        with pytest.raises(CommError, match=r"called another collective|bytes where|did not answer within 2 s"):
            c.check_peers()

    run_threads(hosts, body)


def test_another_call_is_an_error_over_mpi():
    """Each kind in a job of its own communicators, one after the other."""
    done = run_ranks(3, "tests/support/programs/wrong_calls.py", "mpi")
    assert done.returncode == 0 and done.stdout.count("told") == 3 * len(WRONG_CALLS), done.stdout + done.stderr


@pytest.mark.parametrize("transport", ["shared", "tcp", "hybrid"])
def test_counts_that_do_not_fit_name_both_numbers(transport):
    """Again and again, since ranks give up at the same time and their reasons arrive in pieces."""
    hosts, opened = options(transport, 3)

    def body(world):
        c = open_communicator(world, timeout=20, arena_bytes=1 << 26, **opened)
        send = [2, 2, 2] if world.rank else [2, 3, 2]  # rank 1 expects 2 from rank 0
        with pytest.raises(CommError, match=r"rank 0 sent 12 bytes .*expected"):
            c.all_to_all(np.zeros(sum(send), np.int32), send, [2, 2, 2])
            c.barrier()

    for _ in range(5):
        run_threads(hosts, body)


@pytest.mark.parametrize("transport", ["shared", "tcp", "hybrid"])
def test_who_leaves_is_not_missed(transport):
    hosts, opened = options(transport, 3)

    def body(world):
        c = open_communicator(world, timeout=2, arena_bytes=1 << 26, **opened)
        c.barrier()
        if world.rank == 2:
            c.close()
            return
        end = time.monotonic() + 2.2
        while time.monotonic() < end:
            c.check_peers()
            time.sleep(0.05)
        if world.rank == 0:
            c.send(np.ones(5), 1)
        else:
            assert c.recv(np.zeros(5), 0).all()

    run_threads(hosts, body)


def test_a_part_of_a_part_names_ranks_as_the_job_does():
    def body(world):
        c = open_communicator(world, timeout=1, arena_bytes=1 << 26)
        half = c.split(world.rank % 2)
        if world.rank == 3:
            time.sleep(2)
        elif world.rank == 1:
            with pytest.raises(CommError, match="rank 3"):
                half.recv(np.zeros(5), 1)

    run_threads(4, body)


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_silent_rank_is_named(transport):
    hosts, opened = options(transport, 3)

    def body(world):
        c = open_communicator(world, timeout=1, arena_bytes=1 << 26, **opened)
        if world.rank == 2:
            time.sleep(2.5)
            return
        start = time.monotonic()
        with pytest.raises(CommError, match=r"rank 2|rank [01].*gave up"):
            c.all_reduce(np.zeros(1000, np.float32))
        assert time.monotonic() - start < 5

    run_threads(hosts, body)


def start_job(ranks: int, *words: str, **more):
    """Processes of tests/support/programs/until_lost.py, started as torchrun would."""
    job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}
    return [
        start_program([sys.executable, "tests/support/programs/until_lost.py", *words], {**job, "RANK": str(r)})
        for r in range(ranks)
    ]


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(secrets.token_hex(16))
    path.chmod(0o600)
    return str(path)


@pairs({"transport": ["auto", "tcp"], "what": ["reduce", "recv", "idle"], "how": [signal.SIGKILL, signal.SIGSTOP]})
def test_lost_process_is_noticed_by_all(transport, what, how, secret_file):
    """A killed one at once, a stopped one within the timeout, whatever the others do; they name it, and leave no
    memory behind.
    """
    timeout = 2.0
    processes = start_job(3, transport, what, str(timeout), CKDIST_JOB_SECRET_FILE=secret_file)
    try:
        for rank, p in enumerate(processes):
            assert p.stdout.readline() == f"rank {rank} pid {p.pid} running\n", p.stderr.read()
        time.sleep(0.2)
        processes[1].send_signal(how)
        start = time.monotonic()
        for rank in (0, 2):
            _, error = processes[rank].communicate(timeout=20)
            assert processes[rank].returncode == 1 and error.startswith(f"rank {rank}: rank ") and "rank 1 " in error, (
                error
            )
        assert time.monotonic() - start < (timeout / 2 if how == signal.SIGKILL else timeout) + 1
    finally:
        for p in processes:
            p.kill()
            p.communicate()


@pytest.mark.parametrize(
    "how, what",
    [(signal.SIGKILL, "reduce"), (signal.SIGSTOP, "reduce"), (signal.SIGSTOP, "recv"), (signal.SIGSTOP, "idle")],
)
def test_lost_process_under_mpirun(how, what):
    """A killed one mpirun itself notices; a stopped one the others name, with what they were doing, over MPI as over
    anything else.
    """
    timeout = 2.0
    program = ("tests/support/programs/until_lost.py", "mpi", what, str(timeout))
    with start_program([*mpirun(3)[:-1], *launcher.STUB, sys.executable, *program], {}) as job:
        try:
            lines = [job.stdout.readline() for _ in range(3)]
            pids = {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d) pid (\d+) running", "".join(lines))}
            time.sleep(0.2)
            os.kill(pids[1], how)
            start = time.monotonic()
            if how == signal.SIGSTOP:
                said = next(line for line in iter(job.stderr.readline, "") if line.startswith("rank "))
                assert time.monotonic() - start < timeout + 1
                wanted = {"reduce": r"\(in all_reduce \d+\)", "recv": r"\(in a message\)", "idle": ""}[what]
                assert re.search(rf"^rank [02]: rank 1 .*{wanted}", said), said
            job.stderr.read()
            assert job.wait(10)
        finally:
            job.kill()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids.values() if psutil.pid_exists(pid)], timeout=5)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


class TestHandshake:
    """Who joins a job must know its secret."""

    def listen(self, secret: bytes):
        lines = []
        return Listener("127.0.0.1", 0, 0, secret, patience=0.5, log=lines.append), lines

    def test_both_know(self):
        listener, _ = self.listen(b"s" * 16)
        purpose = Purpose(b"test", 1, 0)
        near, near_keys = connect(listener.address, purpose, b"s" * 16, 5)
        far, far_keys = listener.take(purpose, time.monotonic() + 5)
        near.sendall(b"x")
        assert far.recv(1) == b"x" and near_keys == far_keys == b""
        for s in (near, far):
            s.close()
        listener.close()

    def test_keys_differ_by_connection_and_direction(self):
        listener = Listener("127.0.0.1", 0, 0, b"s" * 16, sealed=True)
        keys = []
        for lane in range(2):
            near = connect(listener.address, Purpose(b"test", 1, 0, lane), b"s" * 16, 5, sealed=True)
            far = listener.take(Purpose(b"test", 1, 0, lane), time.monotonic() + 5)
            assert near.keys == far.keys[16:] + far.keys[:16]
            keys += [near.keys[:16], near.keys[16:]]
            near.socket.close(), far.socket.close()
        assert len(set(keys)) == 4
        listener.close()

    @pytest.mark.parametrize("sealed", [True, False])
    def test_the_ends_agree_whether_to_seal(self, sealed):
        listener, _ = self.listen(b"s" * 16)
        listener.sealed = not sealed
        words = ("with", "without") if sealed else ("without", "with")
        with pytest.raises(
            CommError, match=f"was started {words[0]} --encrypt never, and this rank {words[1]} --encrypt"
        ):
            connect(listener.address, Purpose(b"test", 1, 0), b"s" * 16, 2, sealed=sealed)
        listener.close()

    def test_strangers_are_dropped_with_one_line(self):
        listener, lines = self.listen(b"s" * 16)
        with pytest.raises(CommError, match="secret"):
            connect(listener.address, Purpose(b"test", 1, 0), b"t" * 16, 2)
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, os.urandom(4096)):
            with socket.create_connection(listener.address) as stranger:
                stranger.sendall(garbage)
                stranger.settimeout(5)
                try:
                    while stranger.recv(4096):
                        pass
                except ConnectionResetError:
                    pass
        with pytest.raises(CommError, match="rank 1 did not join"):
            listener.take(Purpose(b"test", 1, 0), time.monotonic() + 0.5)
        assert len(lines) >= 4 and all("\n" not in line for line in lines)
        listener.close()

    def test_silent_strangers_do_not_keep_a_rank_out(self):
        listener = Listener("127.0.0.1", 0, 0, b"s" * 16)
        with contextlib.ExitStack() as held:
            for _ in range(705):
                held.enter_context(socket.create_connection(listener.address, 5))
            begun = time.monotonic()
            purpose = Purpose(b"test", 1, 0)
            connect(listener.address, purpose, b"s" * 16, 20).socket.close()
            listener.take(purpose, time.monotonic() + 5).socket.close()
            assert time.monotonic() - begun < 5
        listener.close()

    def test_who_connects_proves_first(self):
        """A stranger gets a nonce and nothing that depends on the secret; the rank it then is refused to, too."""
        listener, _ = self.listen(b"s" * 16)
        hello = struct.pack("!8s32s?4sIII", b"ckdist2\n", bytes(32), False, b"test", 1, 0, 0)
        said = []
        for _ in range(2):
            with socket.create_connection(listener.address, 5) as stranger:
                stranger.sendall(hello + bytes(32))
                parts = []
                with contextlib.suppress(ConnectionResetError):
                    while part := stranger.recv(4096):
                        parts.append(part)
                said.append(b"".join(parts))
        assert (
            [len(data) for data in said] == [len(hello)] * 2
            and said[0][40:] == hello[40:]
            and said[0][8:40] != said[1][8:40]
        )
        listener.close()

    def test_listener_without_the_secret(self):
        listener, _ = self.listen(b"t" * 16)
        with pytest.raises(CommError, match="secret"):
            connect(listener.address, Purpose(b"test", 1, 0), b"s" * 16, 2)
        listener.close()

    @pytest.mark.parametrize("absent", [0, 1])
    def test_connecting_ends_in_its_own_time(self, absent):
        """One rank says where it listens, and then neither takes connections nor makes one."""

        def body(world):
            if world.rank == absent:
                job_secret(world)
                world.gather(["127.0.0.1", free_port()])
                return
            start = time.monotonic()
            with pytest.raises(
                CommError,
                match="rank 0 at .* does not answer within 1 s"
                if absent == 0
                else "rank 1 did not join rank 0 in time",
            ):
                connect_ranks(world, None, [DATA, HEARTBEATS], seconds=1)
            assert time.monotonic() - start < 5

        run_threads(2, body)

    def test_connecting_may_take_longer_than_a_step(self):
        def body(world):
            gather = world.gather

            def late(value):
                values = gather(value)
                if isinstance(value, list):  # where everyone listens
                    world.gather = gather
                    time.sleep(2.5 * world.rank)
                return values

            world.gather = late
            open_communicator(world, "tcp", timeout=2, arena_bytes=1 << 26).barrier()

        run_threads(2, body)

    def test_secret_files(self, secret_file, tmp_path, monkeypatch):
        assert len(read_secret(secret_file)) == 32
        os.chmod(secret_file, 0o644)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_secret(secret_file)
        monkeypatch.delenv("CKDIST_JOB_SECRET_FILE", raising=False)
        with pytest.raises(ConfigError, match="CKDIST_JOB_SECRET_FILE"):
            read_secret()

    def test_garbage_after_the_handshake(self):
        """A peer that knows the secret and sends something else than frames is lost, by name."""
        port, failures = free_port(), []

        def honest():
            world = TcpWorld(0, 2, "127.0.0.1", port, b"s" * 16, timeout=10)
            with pytest.raises(CommError, match="rank 1 sent something that is not a frame") as failure:
                open_communicator(world, "tcp", timeout=5)
            failures.append(failure)
            world.close()

        def hostile():
            world = TcpWorld(1, 2, "127.0.0.1", port, b"s" * 16, timeout=10)
            world.gather(0)  # the bytes of its arena
            (address, _) = world.gather(["127.0.0.1", 1])
            data, heartbeats = (
                connect(tuple(address), Purpose(kind, 1, 0), b"s" * 16, 5).socket for kind in (DATA, HEARTBEATS)
            )
            world.gather(["", False])  # its transport is open
            data.sendall(os.urandom(4096))
            time.sleep(0.5)
            data.close()
            heartbeats.close()
            world.close()

        threads = [threading.Thread(target=f) for f in (honest, hostile)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
        assert failures
