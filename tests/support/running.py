"""A server over the bundled model, as a user starts it."""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx

from tests.support.launcher import environment
from tests.support.paths import ROOT

START_SECONDS = 90.0


@contextlib.contextmanager
def running(*flags: str, threads: tuple[str, ...] = ("-t", "1")) -> Iterator[str]:
    """`ckdist serve flags...` of one rank and one thread; its URL, once it is ready."""
    words = [sys.executable, "-m", "ckdist.cli.main", "serve", "--port", "0", *threads, "-tp", "1", *flags]
    given = {"env": environment(), "cwd": ROOT, "text": True}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **given)
    try:
        assert process.stdout is not None
        url = next(found[1] for line in process.stdout if (found := re.search(r"serving .* at (http://\S+)", line)))
        end = time.monotonic() + START_SECONDS
        while httpx.get(url + "/health").status_code != 200:
            assert time.monotonic() < end, "the server is not ready in time"
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
