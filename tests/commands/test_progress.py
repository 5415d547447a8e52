"""A bar is for terminals: a pipe gets nothing, a terminal one line, and no standard error is no error."""

import fcntl
import os
import pty
import select
import struct
import sys
import termios

from ckdist.progress import progress_bar


def filled(stream, monkeypatch, **more):
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar(10, "B", "loading", **more) as bar:
        bar.update(10)


def test_a_pipe_gets_nothing(monkeypatch, tmp_path):
    with open(tmp_path / "log", "w") as log:
        filled(log, monkeypatch)
    assert (tmp_path / "log").read_bytes() == b""
    filled(None, monkeypatch)


def test_a_terminal_gets_one_line(monkeypatch):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with open(theirs, "w") as terminal:
        filled(terminal, monkeypatch, shown=False)
        filled(terminal, monkeypatch, leave=True)
        text = b""
        while b"\n" not in text and select.select([ours], [], [], 5)[0]:  # it comes in pieces
            text += os.read(ours, 4096)
    os.close(ours)
    assert b"loading" in text and text.count(b"\n") == 1 and b"\x1b" not in text
