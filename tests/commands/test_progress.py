"""A bar is for terminals: a pipe gets nothing, a terminal one line, and no standard error is no error."""

import contextlib
import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time

import pytest

from ckdist.cli.rows import write_rows
from ckdist.progress import ProgressBar
from ckdist.terminal import styled


@contextlib.contextmanager
def terminal(width: int = 80):
    """A terminal's stream, and a function that gives what was written to it until `word` came."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))

    def seen(word: bytes) -> bytes:
        text, until = b"", time.monotonic() + 10
        while word not in text and time.monotonic() < until and select.select([ours], [], [], 5)[0]:
            text += os.read(ours, 65536)
        return text

    with open(theirs, "w") as stream:
        yield stream, seen
    os.close(ours)


def filled(stream, monkeypatch, **more) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with ProgressBar(10, "B", "packing", **more) as bar:
        bar.update(10)
        bar.say("a line")


def test_a_pipe_gets_nothing(monkeypatch, tmp_path):
    with open(tmp_path / "log", "w") as log:
        filled(log, monkeypatch)
    assert (tmp_path / "log").read_bytes() == b""
    filled(None, monkeypatch)


def test_a_task_that_asks_for_lines_logs_some_without_a_terminal(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr("ckdist.progress.LINE_SECONDS", 0.05)
    with open(tmp_path / "log", "w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        with ProgressBar(9, "token", "reading", start=4, lines=True) as bar:
            bar.update(1)
            time.sleep(0.05)
            bar.update(2)
            bar.update(1)
    assert caplog.messages == ["reading: 7 of 9 tokens"]


@pytest.mark.parametrize("plain", [True, False])
def test_a_terminal_gets_a_bar_and_colours_that_switch_off(monkeypatch, plain):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1" if plain else "")
    with terminal() as (stream, seen):
        filled(stream, monkeypatch, shown=False)
        filled(stream, monkeypatch, leave=True)
        print("end", file=stream, flush=True)
        text = seen(b"end")
        assert (styled("x", "error", stream) == "x") is plain
    assert b"packing" in text and b"100%" in text and b"a line" in text
    assert (b"\x1b[38;5" in text or b"\x1b[3" in text) is not plain


def test_a_table_fits_its_terminal_and_is_markdown_in_a_pipe(monkeypatch, capsys):
    rows = [{"model": "a rather long name of a model " * 3, "t/s": 12.5}, {"model": "short", "t/s": 7.25}]
    write_rows(rows, "md")
    assert capsys.readouterr().out.count("|") == 12
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("COLUMNS", raising=False)
    with terminal(width=60) as (stream, seen):
        monkeypatch.setattr(sys, "stdout", stream)
        write_rows(rows, "md")
        print("end", file=stream, flush=True)
        text = seen(b"end").decode().replace("\r", "")
    assert max(map(len, text.splitlines())) <= 60 and "7.25" in text and "|" not in text
