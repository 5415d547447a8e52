"""Groups of ranks against numpy, bit for bit: ranks as threads, as processes, in shared memory, over wires and both;
data races.
"""

import gc
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import pytest

from ckdist import errors, native
from ckdist.comm.group import open_group
from tests.support import thread_ranks
from tests.support.exchange import exchange
from tests.support.paths import ROOT

lib, ffi = native.lib, native.ffi


def host_group(rank: int, size: int, path: str | None = None, timeout: float = 20.0, spins: int = 20):
    """A handle, freed with its last reference."""
    out = ffi.new("struct ckdist_group **")
    native.check(lib.ckdist_host_group(ffi.NULL if path is None else path.encode(), rank, size, spins, timeout, out))
    return ffi.gc(out[0], lib.ckdist_group_free)


def path_of(group) -> str:
    return ffi.string(lib.ckdist_group_path(group)).decode()


def run_threads(size: int, body, **options) -> list[BaseException]:
    """body(handle, rank, size) on a thread per rank; the errors of those that raised, in rank order."""
    first, raised = host_group(0, size, **options), {}

    def work(rank: int) -> None:
        try:
            body(first if rank == 0 else host_group(rank, size, path_of(first), **options), rank, size)
        except BaseException as error:
            raised[rank] = error

    threads = [threading.Thread(target=work, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [raised[r] for r in sorted(raised)]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_threads(size):
    assert not run_threads(size, lambda handle, rank, size: exchange(handle, rank, size, 40))


@pytest.mark.parametrize("hosts", ["ab", "abc", "aab", "aabb", "abab", "aabbc", "aabbbcc", "abcabcabc"])
def test_hosts(hosts):
    kinds = thread_ranks.run_threads(
        hosts,
        lambda world: (
            (
                (group := open_group(world, 20, 20.0))
                and exchange(group.handle, world.rank, world.size, 30, hosts=world.hosts)
            )
            or group.kind
        ),
    )
    assert set(kinds) == {"tcp" if len(set(hosts)) == len(hosts) else "shared memory and tcp"}


def test_a_rank_that_gives_up_is_named_on_every_host():
    """Rank 3 fails, which its own host sees in memory, and the other host hears over the wire."""

    def body(world):
        group = open_group(world, 20, 5.0)
        native.check(lib.ckdist_group_reserve(group.handle, 16, 1, 1, 0, 0, 1))
        world.gather(None)
        if world.rank == 3:
            lib.ckdist_group_abandon(group.handle, b"its disk broke")
            return
        with pytest.raises(errors.CommError, match=r"rank 3 .*gave up(?=.*step 5).*its disk broke") as raised:
            native.check(lib.ckdist_group_reduce(group.handle, 0, 16, 5))
        lib.ckdist_group_abandon(group.handle, str(raised.value).encode())

    start = time.monotonic()
    thread_ranks.run_threads("aabb", body)
    assert time.monotonic() - start < 4


def test_a_rank_that_is_late_is_named_on_every_host():
    late = threading.Event()

    def body(world):
        group = open_group(world, 20, 1.0)
        native.check(lib.ckdist_group_reserve(group.handle, 16, 1, 1, 0, 0, 1))
        world.gather(None)
        if world.rank == 3:
            assert late.wait(20)
            return
        try:
            with pytest.raises(errors.CommError, match=r"rank 3 .*did not reach step 5 within 1 s") as raised:
                native.check(lib.ckdist_group_reduce(group.handle, 0, 16, 5))
            lib.ckdist_group_abandon(group.handle, str(raised.value).encode())
        finally:
            if world.rank == 1:  # the last to be told
                late.set()

    thread_ranks.run_threads("aabb", body)


def test_a_rank_that_gives_up_ends_the_others():
    def body(handle, rank, size):
        native.check(lib.ckdist_group_reserve(handle, 16, 1, 1, 0, 0, 1))
        if rank == 1:
            lib.ckdist_group_abandon(handle, b"its disk broke")
        else:
            native.check(lib.ckdist_group_reduce(handle, 0, 16, 5))

    start = time.monotonic()
    raised = run_threads(3, body)
    assert len(raised) == 2 and all(
        isinstance(e, errors.CommError) and "rank 1" in str(e) and "step 5: its disk broke" in str(e) for e in raised
    )
    assert time.monotonic() - start < 2


def test_a_rank_that_is_late_is_named():
    def body(handle, rank, size):
        native.check(lib.ckdist_group_reserve(handle, 16, 1, 1, 0, 0, 1))
        if rank != 2:
            native.check(lib.ckdist_group_reduce(handle, 0, 16, 3))

    raised = run_threads(3, body, timeout=0.5)
    assert len(raised) == 2 and all("rank 2" in str(e) and "did not reach step 3 within" in str(e) for e in raised)


STOPPED_RANK = """
import sys, os, signal
from ckdist import native
out = native.ffi.new("struct ckdist_group **")
native.check(native.lib.ckdist_host_group(sys.argv[1].encode(), 1, 2, 20, 5.0, out))
print("there", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_rank_that_is_stopped_between_steps_is_named():
    group = host_group(0, 2, timeout=0.3)
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED_RANK, path_of(group)], stdout=subprocess.PIPE, cwd=ROOT
    ) as peer:
        try:
            assert peer.stdout.readline() == b"there\n"
            with pytest.raises(errors.CommError, match=rf"rank 1 \(pid {peer.pid}\) has been stopped"):
                for _ in range(100):
                    time.sleep(0.05)
                    native.check(lib.ckdist_group_check_peers(group))
        finally:
            peer.kill()
    with pytest.raises(errors.CommError, match=r"rank 1 .* died"):
        native.check(lib.ckdist_group_check_peers(group))


def test_groups_leave_no_descriptor_behind():
    count = lambda: sum(
        "memfd:ckdist" in os.readlink(p) for p in pathlib.Path("/proc/self/fd").iterdir() if p.is_symlink()
    )
    gc.collect()
    before = count()
    for _ in range(5):
        assert not run_threads(2, lambda handle, rank, size: exchange(handle, rank, size, 1))
    gc.collect()
    assert count() <= before


def test_hostile_ranks_are_refused():
    for rank, size in ((0, 0), (-1, 2), (2, 2), (0, 1000)):
        with pytest.raises(errors.ConfigError, match="ranks on one host"):
            host_group(rank, size)
    with pytest.raises(errors.CommError, match="cannot open another rank's shared memory"):
        host_group(1, 2, "/nowhere")


@pytest.fixture(scope="module")
def meeting(tmp_path_factory):
    """The test of meetings under ThreadSanitizer."""
    binary = tmp_path_factory.mktemp("meeting") / "meeting"
    native_folder = ROOT / "ckdist/native"
    sources = [
        native_folder / name
        for name in ("comm/host_group.cpp", "comm/host_ranks.cpp", "comm/segment.cpp", "runtime/pool.cpp")
    ]
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler")
    words = [
        compiler,
        "-std=c++17",
        "-O1",
        "-g",
        "-fsanitize=thread",
        "-pthread",
        f"-I{native_folder}",
        ROOT / "tests/native/meeting.cpp",
        *sources,
        "-o",
        binary,
    ]
    built = subprocess.run(words, capture_output=True, text=True)
    if built.returncode and "tsan" in built.stderr:
        pytest.skip("this compiler has no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    return binary


@pytest.mark.parametrize("ranks, threads, rounds", [(1, 3, 500), (2, 3, 1000), (3, 2, 500), (5, 1, 300), (7, 2, 200)])
def test_no_data_race(meeting, ranks, threads, rounds):
    done = subprocess.run([meeting, str(ranks), str(threads), str(rounds)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "WARNING" not in done.stderr, (done.stdout + done.stderr)[:4000]
