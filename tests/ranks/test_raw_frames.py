"""Frames that no honest rank sends, written to a rank's own connections: each is refused by name, nothing is stored."""

import os
import struct
import threading
import time

import numpy as np
import pytest

from ckdist.comm.communicator import open_communicator
from ckdist.comm.transports import opening
from ckdist.comm.transports.transport_choice import LARGE
from ckdist.comm.window import Window
from ckdist.errors import CommError
from tests.support.thread_ranks import run_threads

HEADER = struct.Struct("<IBBHiIQqqq")  # magic, kind, parts, pad, tag, mark, sequence, offset, bytes, total
MAGIC = 0x31446B63
MESSAGE, PART, PUT, GET, GOT, NOTIFY, GOODBYE, PLACED, TAKEN = range(1, 10)
LONG = 1 << 20  # bytes of a message that takes all lanes
NEXT = 2 + LARGE[1]  # the sequence of rank 1's next message: the measured exchanges and the window took those before
USER_TAG = 8  # the tag on the wire of a message with tag 0


def frame(kind, size=0, *, parts=1, tag=0, sequence=0, offset=0, total=None, data=None, magic=MAGIC, mark=0, pad=0):
    head = HEADER.pack(magic, kind, parts, pad, tag, mark, sequence, offset, size, size if total is None else total)
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
    """A function: rank 1 writes frames, pairs of a lane and bytes, and rank 0 fails as a pattern says."""
    files, connect = {}, opening.connect_ranks
    monkeypatch.setattr(
        opening, "connect_ranks", lambda world, *more: files.setdefault(world.rank, connect(world, *more))
    )

    def run(frames, pattern: str, lanes: int = 1) -> None:
        files.clear()
        both = threading.Barrier(2)

        def body(world):
            c = open_communicator(world, "tcp", timeout=5, arena_bytes=1 << 20, share=False, lanes=lanes)
            memory = np.zeros(1 << 16, np.uint8)
            window = Window(c, 0, memory[:64])
            both.wait(20)
            if world.rank == 1:
                for lane, data in frames:
                    write(files[1][lane], data)
            else:
                with pytest.raises(CommError, match=pattern) as failure:
                    c.recv(np.zeros(LONG, np.uint8), 1)
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
        (
            frame(NOTIFY, 5000, offset=3),
            "notify, lane 0, tag 0, sequence 0, offset 3, 5000 of 5000 bytes.*out of bounds",
        ),
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
        (frame(MESSAGE, 4, total=1 << 30, data=b""), "message.*other bytes than its lane carries"),
        (frame(MESSAGE, 4, parts=2), "message.*another number of parts"),
        (frame(MESSAGE, 4, pad=1), "message.*a field that must be 0 is not"),
        (frame(PART, 4, parts=2), "part.*on a lane where its kind does not travel"),
        (frame(MESSAGE, (1 << 40) + 1, data=b""), "message.*a size out of bounds"),
        (frame(MESSAGE, 1 << 40, data=b"", sequence=NEXT), "bytes that nobody receives"),
        (frame(10), "something that is not a frame .magic 31446b63, kind 10, lane 0"),
        (frame(MESSAGE, magic=1), "something that is not a frame .magic 00000001, kind 1, lane 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_frame_that_breaks_a_rule_is_refused_by_name(refused, sent, rule):
    refused([(0, sent)], rf"rank 1 \(on b\) sent .*{rule}")


def test_two_parts_of_one_lane_complete_no_message(refused):
    """The other lane is in the middle of its part, and would write on into memory that the caller has back."""
    half, quarter = LONG // 2, LONG // 4
    to = {"parts": 2, "tag": USER_TAG, "total": LONG, "sequence": NEXT}
    first, second = frame(MESSAGE, half, **to), frame(PART, half, offset=half, **to)
    beyond = frame(PART, half, offset=half, **to)
    refused([(0, first[: 48 + quarter]), (1, second), (1, beyond)], "part, lane 1.*it came already", lanes=2)
    refused([(0, first), (0, second)], "part, lane 0.*on a lane where its kind does not travel", lanes=2)
