"""Copies a child's standard error to this process's own, and keeps its last line as the reason of the child's end."""

import contextlib
import os
import threading

CHUNK, MAX_LINE = 1 << 16, 1000
CLOSE_SECONDS = 1.0  # limit for the arrival of a child's last output


class ErrorOutput:
    """A pipe and the thread that empties it. `writing` is the child's end; `started` closes it in this process."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        self._last = b""
        self._thread = threading.Thread(target=self._copy, daemon=True, name="ckdist-errors")
        self._thread.start()

    def started(self) -> None:
        """Call this once the child has the writing end."""
        os.close(self.writing)

    def last_line(self) -> str:
        """Returns the last line that is not empty, or "". Call this once the child has ended."""
        self._thread.join(CLOSE_SECONDS)  # a grandchild may hold the pipe open
        lines = [line for line in self._last.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""

    def _copy(self) -> None:
        while data := os.read(self._reading, CHUNK):
            self._last = (self._last + data)[-MAX_LINE:]
            with contextlib.suppress(OSError):
                os.write(2, data)
        os.close(self._reading)
