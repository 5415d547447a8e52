"""Damaged sessions for the parser of frames between ranks (tests/native/fuzz), under sanitizers."""

import os
import re
import subprocess

from tests.support.compiled import NATIVE, OURS, compiled

SECONDS = os.environ.get("CKDIST_FUZZ_SECONDS", "3")  # `make fuzz` takes longer
TRANSPORTS = NATIVE / "comm/transports"
SOURCES = [
    OURS / "fuzz/frame_fuzz.cpp",
    *(TRANSPORTS / f"{n}.cpp" for n in ("stream_transport", "stream_frames", "transport")),
]
FLAGS = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def test_damaged_frames_are_refused_and_nothing_is_stored_elsewhere():
    program = compiled("frame_fuzz", SOURCES, *FLAGS, unknown=["cannot find -lasan", "libasan", "libubsan", "-lubsan"])
    done = subprocess.run([program, SECONDS], capture_output=True, text=True, timeout=float(SECONDS) + 120)
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)
    sessions, refused = map(
        int, re.fullmatch(r"(\d+) sessions of seed \d+, (\d+) of them refused\n", done.stdout).groups()
    )
    assert sessions > 20 and 0 < refused < sessions, "most sessions are damaged, and not all"
