"""Bytes that no honest rank or agent sends while a job starts: one line of an error, in time, never anything else."""

import contextlib
import fcntl
import os
import resource
import socket
import struct

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckdist.comm.bootstrap import connection as start_up
from ckdist.comm.bootstrap.connection import BootstrapConnection, receive
from ckdist.comm.bootstrap.handshake import Listener, Purpose, connect
from ckdist.comm.bootstrap.sealed_messages import SealedMessages
from ckdist.comm.bootstrap.star_world import StarWorld
from ckdist.errors import CommError
from ckdist.launcher.agent_frames import FrameReader

EXAMPLES = int(os.environ.get("CKDIST_FUZZ_EXAMPLES", "150"))
FUZZ = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
SECRET = b"s" * 16

# msgpack as it comes, with a few bytes changed, cut, or with keys that Python cannot have
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)
PACKED = VALUES.map(msgpack.packb)
ODD = st.sampled_from(
    [b"\x81\x91\x01\x02", b"\x81\x80\x01", b"\xd7\xff" + b"\xff" * 8, b"\xdd\xff\xff\xff\xff", b"\x91" * 3000]
)
BODIES = PACKED | ODD | st.binary(max_size=64) | st.tuples(PACKED, st.binary(max_size=8)).map(b"".join)
LENGTHS = st.none() | st.sampled_from([0, 1, 1 << 20, (64 << 20) + 1, 1 << 31, (1 << 31) + 3, (1 << 32) - 1])


def framed(parts) -> bytes:
    """Bodies behind their lengths, some of which lie."""
    return b"".join(struct.pack("!I", len(body) if length is None else length) + body for length, body in parts)


STREAMS = st.lists(st.tuples(LENGTHS, BODIES), max_size=4).map(framed) | st.binary(max_size=200)


@settings(max_examples=EXAMPLES, **FUZZ)
@given(STREAMS, st.integers(1, 64))
def test_an_agents_stream_is_messages_or_an_error(data, size):
    reader = FrameReader()
    try:
        for begin in range(0, len(data), size):
            for message in reader.add(data[begin : begin + size]):
                assert isinstance(message, list) and isinstance(message[0], str)
    except CommError as error:
        assert "\n" not in str(error)


@settings(max_examples=EXAMPLES, **FUZZ)
@given(STREAMS)
def test_a_ranks_start_up_messages_are_values_or_an_error(data):
    here, there = socket.socketpair()
    world = StarWorld(0, 2, SECRET)
    world._connections[1] = BootstrapConnection(1, here)
    try:
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        for _ in range(6):
            world._receive([1], 10)
        pytest.fail("there were no six messages")
    except CommError as error:
        assert str(error).startswith(("rank 1 was lost at start-up: ", "one of ranks 1 sent something")), error
        assert "\n" not in str(error)
    finally:
        there.close()
        world.close()


@settings(max_examples=EXAMPLES, **FUZZ)
@given(st.lists(st.binary(min_size=1, max_size=200) | st.just(bytes(70_000)), min_size=1, max_size=3), st.data())
def test_sealed_start_up_messages_arrive_as_they_were_sent_or_not_at_all(messages, data):
    """Bytes of the stream are changed, left out, repeated or inserted on their way."""
    keys = bytes(range(32))
    sealed = SealedMessages(keys)
    stream = bytearray(b"".join(sealed.seal(struct.pack("!I", len(message)) + message) for message in messages))
    at = data.draw(st.integers(0, len(stream) - 1))
    size = data.draw(st.integers(1, min(80, len(stream) - at)))
    piece = bytes(stream[at : at + size])
    stream[at : at + size] = data.draw(st.sampled_from([b"", 2 * piece, piece[::-1], piece + b"x", piece]))
    here, there = socket.socketpair()
    receiver = BootstrapConnection(1, here, keys=keys[16:] + keys[:16])
    try:
        with contextlib.suppress(OSError):  # it does not read on after damage
            there.sendall(stream)
            there.shutdown(socket.SHUT_WR)
        receiver._thread.join(10)
        got = list(receiver.messages)
        assert got == messages[: len(got)]
        assert receiver.end in (
            "it sent bytes that are not sealed with the keys of this job",
            "it closed its connection",
        )
    finally:
        there.close()
        receiver.close()


def test_messages_that_nobody_takes_are_bounded(monkeypatch):
    monkeypatch.setattr(start_up, "MAX_WAITING", (8, 1000))
    for data in (
        (struct.pack("!I", 1) + b"\0") * 9,
        (struct.pack("!I", 600) + bytes(600)) * 2,
    ):
        here, there = socket.socketpair()
        connection = BootstrapConnection(1, here)
        there.sendall(data)
        connection._thread.join(10)
        with pytest.raises(CommError, match="before they were taken"):
            for _ in range(10):
                receive({1: connection}, 10)
        connection.close()
        there.close()


@settings(max_examples=30, **FUZZ)
@given(
    st.lists(st.tuples(st.integers(0, 56), st.integers(1, 255)), max_size=3), st.binary(max_size=48), st.integers(0, 57)
)
def test_a_stranger_is_dropped_and_a_rank_still_comes(changes, proof, cut):
    """A hello with a few bytes changed or cut, then something that is no proof."""
    hello = bytearray(struct.pack("!8s32s?4sIII", b"ckdist2\n", bytes(32), False, b"data", 1, 0, 0))
    for at, change in changes:
        hello[at] ^= change
    told: list[str] = []
    listener = Listener("127.0.0.1", 0, 0, SECRET, patience=5, log=told.append)
    try:
        # it hangs up as soon as it has seen enough
        with contextlib.suppress(OSError), socket.create_connection(listener.address[:2], timeout=10) as stranger:
            stranger.sendall(bytes(hello[:cut]) + proof)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
        connect(listener.address[:2], Purpose(b"data", 1, 0), SECRET, 10).socket.close()
        assert all("\n" not in line and line.startswith("dropped a connection from 127.0.0.1: ") for line in told)
    finally:
        listener.close()


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1200, reason="few files may be open")
def test_rank_0_of_a_large_job_has_descriptors_that_select_does_not_take():
    here, there = socket.socketpair()
    with here, there:
        far = socket.socket(fileno=fcntl.fcntl(here, fcntl.F_DUPFD_CLOEXEC, 1100))
        ends = BootstrapConnection(1, far), BootstrapConnection(0, there)
        ends[1].send(b"hello")
        assert receive({1: ends[0]}, 10) == [b"hello"]
        for end in ends:
            end.close()
