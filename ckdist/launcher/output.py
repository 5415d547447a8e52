"""What the ranks of a job write, joined on this process's standard output and error."""

import contextlib
import sys

from ckdist.terminal import styled


class Output:
    """`prefix`: every line begins with its rank, as `[1]`. `say` writes the supervisor's own lines."""

    def __init__(self, prefix: bool = True) -> None:
        self._prefix = prefix

    def line(self, rank: int | str, stream: int, text: bytes) -> None:
        """A line of a rank, or of a host; `stream`: 1 standard output, 2 standard error."""
        out = sys.stderr if stream == 2 else sys.stdout
        begin = f"[{rank}] ".encode() if self._prefix else b""
        out.flush()
        out.buffer.write(begin + text + b"\n")
        out.buffer.flush()

    @staticmethod
    def say(text: str) -> None:
        """A line of the supervisor's own."""
        with contextlib.suppress(OSError):
            print(f"{styled('ckdist:', 'error', sys.stderr)} {text}", file=sys.stderr, flush=True)
