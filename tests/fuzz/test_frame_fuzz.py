"""Damaged sessions for the parser of frames between ranks, and damaged sealed records, under sanitizers."""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

from tests.support.compiled import NATIVE, OURS, compiled

SECONDS = os.environ.get("CKDIST_FUZZ_SECONDS", "1")  # `make fuzz` takes longer
SEED = ["1"] if "CKDIST_SAME_CASES" in os.environ else []
TRANSPORTS = NATIVE / "comm/transports"
SEALED = [TRANSPORTS / "sealed_socket.cpp", TRANSPORTS / "sealer.cpp", NATIVE / "core/crypto_library.cpp"]
FRAMES = [TRANSPORTS / f"{n}.cpp" for n in ("stream_transport", "stream_frames", "transport")]
FLAGS = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def test_damaged_streams_are_refused_and_nothing_is_stored_elsewhere():
    """Both programs run at once, each on a core."""
    unknown = ["cannot find -lasan", "libasan", "libubsan", "-lubsan"]
    programs = [
        compiled(name, [OURS / f"fuzz/{name}.cpp", *sources], *FLAGS, unknown=unknown)
        for name, sources in (("frame_fuzz", FRAMES + SEALED), ("sealed_fuzz", SEALED))
    ]
    more = {"capture_output": True, "text": True, "timeout": float(SECONDS) + 120}
    with ThreadPoolExecutor(len(programs)) as pool:
        for done in pool.map(lambda program: subprocess.run([program, SECONDS, *SEED], **more), programs):
            assert done.returncode == 0, done.stderr[-4000:]
            print(done.stdout)
            numbers = re.fullmatch(r"(\d+) sessions of seed \d+, (\d+) of them refused\n", done.stdout).groups()
            sessions, refused = map(int, numbers)
            assert sessions > 5 and 0 < refused < sessions, "most sessions are damaged, and not all"
