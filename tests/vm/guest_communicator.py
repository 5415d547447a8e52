"""Guest program: communicators over verbs, their ranks on rxe0 and rxe1 in turn: `guest_communicator.py CASE...`."""

import functools
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

from ckdist.comm.communicator import open_communicator
from ckdist.errors import CommError, ConfigError
from tests.support import thread_ranks
from tests.support.collective_jobs import WRONG_CALLS
from tests.support.launcher import environment
from tests.support.ports import free_port
from tests.support.programs import collectives

ADDRESSES = ("10.9.0.1", "10.9.0.2")
run_threads = functools.partial(thread_ranks.run_threads, seconds=300)  # the machine is emulated


def interface(rank: int) -> str:
    return ADDRESSES[rank % 2]


def packets() -> int:
    return sum(
        int(path.read_text())
        for path in pathlib.Path("/sys/class/infiniband").glob("rxe?/ports/1/hw_counters/sent_pkts")
    )


def battery(hosts: str, largest: int, share: bool = False) -> None:
    """Every operation against numpy; the digest of all results is that of tcp."""
    before = packets()
    over_verbs = run_threads(
        hosts,
        lambda world: collectives.battery(
            world, largest, transport="verbs", share=share, interface=interface(world.rank)
        ),
    )
    assert packets() - before > 1000, "it went elsewhere"
    assert over_verbs == run_threads(
        hosts, lambda world: collectives.battery(world, largest, transport="tcp", share=share)
    ), "tcp gives other bits"


def two() -> None:
    battery("aa", 40_000)


def three() -> None:
    battery("aaa", 5000)


def four() -> None:
    battery("aaaa", 5000)


def hybrid() -> None:
    """Shared memory inside two hosts of two ranks, verbs between them."""
    battery("abab", 5000, share=True)


def large() -> None:
    """All_reduce of up to 64 MiB from arenas and from ordinary memory: the sum is numpy's, to the last bit, and
    tcp's.
    """
    sizes = [0, 1, 1024, 16 << 10, 256 << 10, 1 << 20, 16 << 20]

    def body(world):
        c = open_communicator(world, "verbs", timeout=60, arena_bytes=1 << 27, interface=interface(world.rank))
        for size in sizes:
            wanted = np.random.default_rng([0, size]).standard_normal(size, np.float32) + np.random.default_rng(
                [1, size]
            ).standard_normal(size, np.float32)
            placed = c.allocate(size)
            placed[:] = np.random.default_rng([world.rank, size]).standard_normal(size, np.float32)
            if size < 16 << 20:
                assert c.all_reduce(placed).tobytes() == wanted.tobytes(), f"{size} elements"
            assert c.all_reduce(placed, out=placed).tobytes() == wanted.tobytes(), f"{size} elements in place"
            del placed
        c.barrier()

    run_threads(2, body)


def pinned() -> None:
    """What `allocate` gives is registered once and stays so over many operations, until it is released."""
    locked = lambda: int(re.search(r"VmPin:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1])

    def body(world):
        c = open_communicator(world, "verbs", arena_bytes=1 << 27, interface=interface(world.rank))
        c.barrier()
        before = locked()
        world.gather(None)
        x = c.allocate(1 << 20)
        world.gather(None)
        during = locked()
        assert during - before == 2 * 4096, (before, during)
        for _ in range(3):
            c.all_reduce(x, out=x)
        c.barrier()
        world.gather(None)
        del x
        world.gather(None)
        assert locked() == before
        world.gather(None)
        c.barrier()

    run_threads(2, body)


def refused() -> None:
    """What is missing on one rank is said on all."""

    def body(world):
        for wanted, words in (
            ("10.9.0.7", r"on rank 1 \(here\): no active RDMA port has the address or interface 10.9.0.7"),
            ("lo", "on rank 1"),
        ):
            try:
                open_communicator(world, "verbs", timeout=5, interface=wanted if world.rank == 1 else ADDRESSES[0])
                raise SystemExit("verbs was opened over an address that is not there")
            except ConfigError as error:
                assert re.search("^--transport verbs does not work " + words, str(error)) and "\n" not in str(error), (
                    error
                )

    run_threads(3, body)


def wrong_calls() -> None:
    """The last of three ranks calls something else than the others: all are told, never a wrong result."""
    for wrong, calls in WRONG_CALLS.items():

        def body(world):
            c = open_communicator(
                world,
                "verbs",
                timeout=2 if wrong == "root" else 20,
                arena_bytes=1 << 26,
                share=False,
                interface=interface(world.rank),
            )
            try:
                calls[world.rank == 2](c, np.zeros(1000, np.float32))
                c.barrier()
            except CommError as error:
                assert re.search("called another collective|bytes where|did not answer within 2 s", str(error)), error
            else:
                raise SystemExit(f"{wrong}: not noticed on rank {world.rank}")

        run_threads("aaa", body)


def slow() -> None:
    """A message that takes several timeouts on its way is waited for, because its bytes flow; so is an all_reduce."""
    timeout, size = 1.5, 24 << 20
    for link in ("wire0", "wire1"):
        subprocess.run(
            ["tc", "qdisc", "add", "dev", link, "root", "tbf", "rate", "40mbit", "burst", "64kb", "limit", "64mb"],
            check=True,
        )

    def body(world):
        c = open_communicator(
            world, "verbs", timeout=timeout, arena_bytes=1 << 26, share=False, interface=interface(world.rank)
        )
        c.barrier()
        start = time.monotonic()
        x = np.arange(size // 4, dtype=np.int32) if world.rank == 0 else np.zeros(size // 4, np.int32)
        if world.rank == 0:
            c.send(x, 1)
        else:
            c.recv(x, 0)
            assert (x == np.arange(size // 4)).all()
        c.barrier()
        took = time.monotonic() - start
        assert took > 2 * timeout, f"the link was not slow: {took:.1f} s"
        print(f"{size * 8e-6 / took:.0f} Mbit/s", flush=True)
        assert (c.all_reduce(np.full(size // 16, world.rank + 1, np.int32)) == 3).all()

    try:
        run_threads(2, body)
    finally:
        for link in ("wire0", "wire1"):
            subprocess.run(["tc", "qdisc", "del", "dev", link, "root"], check=True)


def wire_down() -> None:
    """The link goes while both reduce; each rank names the other within the timeout."""
    timeout = 5.0

    def body(world):
        c = open_communicator(world, "verbs", timeout=timeout, interface=interface(world.rank))
        x = np.ones(20_000, np.float32)
        c.all_reduce(x)
        world.gather(None)
        if world.rank == 0:
            subprocess.run(["ip", "link", "set", "wire1", "down"], check=True)
        start = time.monotonic()
        try:
            while True:
                c.all_reduce(x)
        except CommError as error:
            took = time.monotonic() - start
            print(f"rank {world.rank} after {took:.1f} s: {error}", flush=True)
            # its own, or the peer's
            assert "cannot be reached: port 1 of RDMA device rxe" in str(error) and "went down" in str(error), error
            assert took < timeout + 2, took
            again = time.monotonic()
            try:
                c.barrier()
                raise SystemExit("a communicator that failed goes on")
            except CommError as second:
                assert str(second) == str(error) and time.monotonic() - again < 1

    try:
        run_threads(2, body)
    finally:
        subprocess.run(["ip", "link", "set", "wire1", "up"], check=True)
        subprocess.run(["tests/vm/route_wires.sh"], check=True)
        time.sleep(1)


def lost() -> None:
    """Three processes; one is killed, or stopped, in the middle: both others end and name it."""
    for what, how in (("reduce", signal.SIGKILL), ("reduce", signal.SIGSTOP), ("idle", signal.SIGSTOP)):
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(secrets.token_hex(16))
            file.flush()
            os.chmod(file.name, 0o600)
            job = {
                **environment(),
                "WORLD_SIZE": "3",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
                "CKDIST_JOB_SECRET_FILE": file.name,
            }
            command = [sys.executable, "tests/support/programs/until_lost.py", "verbs", what, "2"]
            ranks = [
                subprocess.Popen(
                    [*command, interface(r)],
                    env={**job, "RANK": str(r)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for r in range(3)
            ]
            try:
                for rank in ranks:
                    line = rank.stdout.readline()
                    assert line.endswith("running\n"), rank.stderr.read()
                ranks[1].send_signal(how)
                start = time.monotonic()
                for r in (0, 2):
                    _, error = ranks[r].communicate(timeout=30)
                    print(f"rank {r} after {time.monotonic() - start:.1f} s: {error.strip()}", flush=True)
                    assert ranks[r].returncode == 1 and "rank 1" in error, error
                assert time.monotonic() - start < 10
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.communicate()


CASES = {f.__name__: f for f in (two, three, four, hybrid, large, pinned, refused, wrong_calls, slow, wire_down, lost)}

if __name__ == "__main__":
    for case in sys.argv[1:]:
        start = time.monotonic()
        CASES[case]()
        print(f"{case} in {time.monotonic() - start:.1f} s", flush=True)
