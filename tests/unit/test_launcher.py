"""Hosts and slots, messages of agents, lines of ranks: what `ckdist launch` reads."""

import os
import pathlib
import subprocess
import sys

import pytest

from ckdist.comm.bootstrap.launched_world import describe, inherited
from ckdist.ended_threads import end_soon
from ckdist.errors import CommError, ConfigError
from ckdist.launcher.agent_frames import GREETING, FrameReader, packed
from ckdist.launcher.hosts import Host, parse_hosts, place_ranks, read_hostfile
from ckdist.launcher.local_ranks import Lines
from ckdist.launcher.remote_ranks import SSH, agent_words
from tests.support.paths import ROOT
from tests.support.served import wait_for


def test_hosts_of_flags_and_files(tmp_path):
    assert parse_hosts("a,b:3, a") == (Host("a", 2), Host("b", 3))
    assert parse_hosts("node-1.x") == (Host("node-1.x"),)
    assert parse_hosts("me@a:2,b_c@a") == (Host("me@a", 2), Host("b_c@a"))
    assert not Host("me@localhost").is_this, "another user's, so it is reached by ssh"
    assert "me@a" in agent_words(SSH, "me@a")
    file = tmp_path / "hosts"
    file.write_text("# comment\n\nn1 slots=2 max_slots=4  # two sockets\nn2:3\nn3\nn3\n")
    assert read_hostfile(str(file)) == (Host("n1", 2), Host("n2", 3), Host("n3", 2))
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="names no host"):
        read_hostfile(str(file))


@pytest.mark.parametrize(
    "text",
    ["", "a,,b", "-oProxyCommand=x", "a b", "a:0", "a:9999", "a;b", "$(x)", "a slots=x", "@a", "me@", "a@b@c", "-x@a"],
)
def test_what_is_no_host(text):
    with pytest.raises(ConfigError, match=r"is not a host|slots; from 1 to 1024"):
        parse_hosts(text)


def test_the_hostfiles_that_come_with_it():
    for path in sorted((ROOT / "hostfiles").glob("*")):
        if path.suffix != ".md":
            assert place_ranks(None, read_hostfile(str(path))), path


@pytest.mark.parametrize(
    "ranks, hosts, placed",
    [
        (4, "a,b", {"a": range(2), "b": range(2, 4)}),
        (3, "a,b", {"a": range(1), "b": range(1, 3)}),
        (3, "a:2,b:2", {"a": range(2), "b": range(2, 3)}),
        (2, "a:2,b:2", {"a": range(2), "b": range(2, 2)}),
        (None, "a:2,b:1", {"a": range(2), "b": range(2, 3)}),
    ],
)
def test_places(ranks, hosts, placed):
    assert place_ranks(ranks, parse_hosts(hosts)) == placed


def test_messages_come_in_any_pieces_behind_what_a_shell_says():
    data = b"Welcome to node1\n" + GREETING + packed("hello", "1") + packed("line", 1, 2, b"x\xff")
    for size in (1, 7, len(data)):
        reader, found = FrameReader(GREETING), []
        for begin in range(0, len(data), size):
            found += reader.add(data[begin : begin + size])
        assert found == [["hello", "1"], ["line", 1, 2, b"x\xff"]]


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\1\x01", b"\0\0\0\2\x91\x01"])
def test_what_is_no_message(data):
    with pytest.raises(CommError):
        list(FrameReader().add(data))
    with pytest.raises(CommError, match="no greeting"):
        list(FrameReader(GREETING).add(bytes(1 << 17)))


def test_lines():
    found = []
    lines = Lines(found.append)
    for part in (b"a", b"b\nc\n\nd", b"e" * (1 << 17), b"f", b""):
        lines.add(part)
    assert [bytes(line[:2]) for line in found] == [b"ab", b"c", b"", b"de", b"f"]


def test_the_words_that_start_an_agent():
    words = agent_words(SSH, "node1")
    assert words[0] == "ssh" and words[-2] == "node1" and words[-1].endswith(" -m ckdist.launcher.agent")
    assert agent_words("in {host}", "x")[:3] == ["in", "x", "env"]
    for template in ("ssh node1", "ssh '{host}"):
        with pytest.raises(ConfigError, match="--agent"):
            agent_words(template, "x")


def test_a_connection_that_was_not_inherited():
    with pathlib.Path(os.devnull).open() as file:
        text = describe({1: file.fileno()})
        fd, inode = text.removeprefix("1=").split(":")
        for wrong in (f"1={fd}:{int(inode) + 1}", "1=99999:1", "1", "x=y:z"):
            with pytest.raises(ConfigError, match="a rank starts its world once"):
                inherited(wrong)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a thread's priority")
def test_threads_of_a_process_that_ends_get_normal_priority():
    # Its first thread ends, as after kill -9; the other one waits for its turn.
    lines = [
        "import ctypes, os, threading, time",
        "def idle(): os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); print(flush=True); time.sleep(60)",
        "threading.Thread(target=idle).start()",
        "ctypes.CDLL(None).pthread_exit(None)",
    ]
    code = "\n".join(lines)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        found = lambda: {os.sched_getscheduler(int(t)) for t in os.listdir(f"/proc/{process.pid}/task")}
        try:
            wait_for(lambda: end_soon(process.pid) or found() == {os.SCHED_OTHER}, 10)
        finally:
            process.kill()
