"""Frames that no honest rank sends, written to a rank's own connections: each is refused by name, nothing is stored."""

import os
import struct
import threading
import time

import numpy as np
import pytest

from ckdist.comm.communicator import open_communicator
from ckdist.comm.transports import opening
from ckdist.comm.window import Window
from ckdist.errors import CommError
from tests.support.thread_ranks import run_threads

HEADER = struct.Struct("<IB3siIQqqq")  # magic, kind, pad, tag, mark, sequence, offset, bytes, total
MAGIC = 0x31446B63
MESSAGE, PUT, GET, GOT, NOTIFY, GOODBYE, PLACED, TAKEN = range(1, 9)
# The sequence of rank 1's next message, after the window and two exchanges, each measured after one to warm up.
NEXT = 5


def frame(kind, size=0, *, tag=0, sequence=0, offset=0, total=None, data=None, magic=MAGIC, mark=0, pad=b""):
    head = HEADER.pack(magic, kind, pad, tag, mark, sequence, offset, size, size if total is None else total)
    return head + (b"A" * min(size, 1 << 20) if data is None else data)


def write(file: int, data: bytes) -> None:
    end = time.monotonic() + 20
    while data and time.monotonic() < end:
        try:
            data = data[os.write(file, data) :]
        except BlockingIOError:
            time.sleep(0.001)
        except OSError:
            return  # the other end has gone


@pytest.fixture
def refused(monkeypatch):
    """A function: rank 1 writes a frame, and rank 0 fails as a pattern says."""
    files, connect = {}, opening.connect_ranks

    def connected(world, *more, **options):
        return files.setdefault(world.rank, connect(world, *more, **options))

    monkeypatch.setattr(opening, "connect_ranks", connected)

    def run(sent: bytes, pattern: str) -> None:
        files.clear()
        both = threading.Barrier(2)

        def body(world):
            world.encrypt = "never"
            c = open_communicator(world, "tcp", timeout=5, arena_bytes=1 << 20, share=False)
            memory = np.zeros(1 << 16, np.uint8)
            window = Window(c, 0, memory[:64])
            both.wait(20)
            if world.rank == 1:
                data, _ = files[1]
                write(data.descriptors[0], sent)
            else:
                with pytest.raises(CommError, match=pattern) as failure:
                    c.recv(np.zeros(1 << 20, np.uint8), 1)
                assert "\n" not in str(failure.value)
                assert not memory.any(), "something was stored"
            both.wait(20)
            del window

        run_threads("ab", body)

    return run


@pytest.mark.parametrize(
    "sent, rule",
    [
        (frame(PUT, 5000), "put.*beyond the window's end"),
        (frame(PUT, 5000, offset=-5000), "put.*a size out of bounds"),
        (frame(PUT, 8, offset=60), "put.*beyond the window's end"),
        (frame(PUT, 8, tag=1), "put.*did not expose such a window"),
        (frame(PUT, 8, total=9), "put.*not all of its bytes"),
        (frame(NOTIFY, 5000, offset=3), "notify, tag 0, sequence 0, offset 3, 5000 of 5000 bytes.*out of bounds"),
        (frame(NOTIFY, offset=1 << 16), "notify.*a slot that no window has"),
        (frame(NOTIFY, tag=7), "notify.*did not expose such a window"),
        (frame(GET, 8), "get.*data where its kind has none"),
        (frame(GET, total=65), "get.*beyond the window's end"),
        (frame(GOT, 8, sequence=1), "got.*a request that was not made"),
        (frame(PLACED, total=1 << 40, sequence=NEXT), "placed.*beyond its sender's memory"),
        (frame(PLACED, 100), "placed.*data where its kind has none"),
        (frame(TAKEN), "taken.*no such message was sent"),
        (frame(TAKEN, 100), "taken.*out of bounds"),
        (frame(GOODBYE, 401), "goodbye.*out of bounds"),
        (frame(MESSAGE, 4, sequence=NEXT + 1), "message.*out of order"),
        (frame(MESSAGE, 4, total=1 << 30, data=b""), "message.*not all of its bytes"),
        (frame(MESSAGE, 4, pad=b"\1"), "message.*a field that must be 0 is not"),
        (frame(MESSAGE, 4, pad=b"\0\0\1"), "message.*a field that must be 0 is not"),
        (frame(MESSAGE, (1 << 40) + 1, data=b""), "message.*a size out of bounds"),
        (frame(MESSAGE, 1 << 40, data=b"", sequence=NEXT), "bytes that nobody receives"),
        (frame(9), "something that is not a frame .magic 31446b63, kind 9."),
        (frame(MESSAGE, magic=1), "something that is not a frame .magic 00000001, kind 1."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_frame_that_breaks_a_rule_is_refused_by_name(refused, sent, rule):
    refused(sent, rf"rank 1 \(on b\) sent .*{rule}")
