"""Joins the output of all ranks of a job on this process's standard output and error."""

import contextlib
import sys

from ckdist.terminal import styled


class Output:
    """Writes lines of ranks and of the supervisor.

    Args:
        prefix: Begin every line of a rank with its number, as `[1]`.
    """

    def __init__(self, prefix: bool = True) -> None:
        self._prefix = prefix

    def line(self, rank: int | str, stream: int, text: bytes) -> None:
        """Writes a line of a rank or host. `stream`: 1 standard output, 2 standard error."""
        out = sys.stderr if stream == 2 else sys.stdout
        begin = f"[{rank}] ".encode() if self._prefix else b""
        out.flush()
        out.buffer.write(begin + text + b"\n")
        out.buffer.flush()

    @staticmethod
    def say(text: str) -> None:
        """Writes a line of the supervisor."""
        with contextlib.suppress(OSError):
            print(f"{styled('ckdist:', 'error', sys.stderr)} {text}", file=sys.stderr, flush=True)
