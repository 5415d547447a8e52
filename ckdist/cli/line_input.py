"""Lines from a terminal, with editing and a persistent history, or lines from a pipe."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator

from ckdist.terminal import has_colours, is_terminal

PROMPT = "> "
MORE = ". "
MOST_LINES = 1000


def history_file() -> pathlib.Path:
    """Returns the file with the history of questions: $XDG_STATE_HOME/ckdist/chat_history."""
    state = os.environ.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local/state"
    return pathlib.Path(state) / "ckdist" / "chat_history"


class LineInput:
    """Iterates over the lines of the input. A line that ends with a backslash continues on the next line.

    On a terminal Ctrl-C drops the line. Only the owner can read the history file.
    """

    def __init__(self) -> None:
        self._terminal = is_terminal(sys.stdin) and is_terminal(sys.stdout)

    def __iter__(self) -> Iterator[str]:
        with self._history() if self._terminal else contextlib.nullcontext():
            while (line := self._line()) is not None:
                yield line

    def _line(self) -> str | None:
        """Returns the next line with its continuations, without the line end; None at the end of the input."""
        parts: list[str] = []
        while True:
            try:
                part = input(_coloured(MORE if parts else PROMPT)) if self._terminal else _piped()
            except EOFError:
                if self._terminal:
                    print()
                return "\n".join(parts) if parts else None
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                print()
                parts = []
                continue
            if not part.endswith("\\"):
                return "\n".join([*parts, part])
            parts.append(part[:-1])

    @contextlib.contextmanager
    def _history(self) -> Iterator[None]:
        """Enables line editing and the history of earlier chats, if this Python has readline."""
        try:
            import readline
        except ImportError:
            yield
            return
        path = history_file()
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(mode=0o600)
                readline.set_history_length(MOST_LINES)
                readline.write_history_file(path)


def _coloured(prompt: str) -> str:
    # \001 and \002 enclose characters that readline must not count.
    return f"\001\x1b[1;36m\002{prompt}\001\x1b[0m\002" if has_colours(sys.stdout) else prompt


def _piped() -> str:
    line = sys.stdin.readline() if sys.stdin is not None else ""
    if not line:
        raise EOFError
    return line.rstrip("\n")
