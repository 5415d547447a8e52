"""A progress bar for a terminal. A pipe or a file never gets one, but a line now and then if the task asks for it.

The thread that reports progress draws it, at most ten times a second. A separate thread would be lost in a fork.
"""

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from ckdist.terminal import console, is_terminal

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger(__name__)
REDRAW_SECONDS = 0.1
LINE_SECONDS = 10.0  # between two lines without a terminal


class ProgressBar:
    """The progress of a long task on one line of standard error. A context manager.

    Args:
        unit: "B" counts bytes, any other word counts things.
        shown: Nothing is ever written if this is false, and no bar is drawn if there is no terminal.
        leave: The finished bar stays.
        start: Units that are done already.
        lines: Without a terminal, log a line every LINE_SECONDS.

    Attributes:
        n: Units of `total` that are done.
        sink: Takes the label, `n` and `total` of every bar of this process. None: bars are drawn.
    """

    sink: Callable[[str, int, int], None] | None = None

    def __init__(
        self,
        total: int,
        unit: str,
        what: str,
        shown: bool = True,
        leave: bool = False,
        start: int = 0,
        lines: bool = False,
    ) -> None:
        self.total, self.n, self._unit, self._what = total, start, unit, what
        self.shown = shown and (self.sink is not None or is_terminal(sys.stderr))
        self._has_lines = lines and shown and not self.shown
        self._drawn = time.monotonic() if self._has_lines else 0.0
        self._progress: Progress | None = None
        if not self.shown or self.sink is not None:
            return
        self._progress = _drawing(unit, leave)
        self._task = self._progress.add_task(what, total=total, completed=start, note="")
        self._progress.start()

    def update(self, done: int) -> None:
        """Adds `done` units."""
        self.n += done
        if self.shown and self.sink is not None:
            self.sink(self._what, self.n, self.total)
        if self._progress is not None:
            self._progress.update(self._task, completed=self.n)
            self._draw()
        elif self._has_lines and time.monotonic() - self._drawn >= LINE_SECONDS:
            self._drawn = time.monotonic()
            log.info("%s: %d of %d %ss", self._what, self.n, self.total, self._unit)

    def note(self, text: str) -> None:
        """Sets the text after the bar, from the next drawing on."""
        if self._progress is not None:
            self._progress.update(self._task, note=text)

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Ends the bar. A second call does nothing."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.refresh()
            progress.stop()

    def _draw(self) -> None:
        now = time.monotonic()
        if self._progress is not None and (now - self._drawn >= REDRAW_SECONDS or self.n >= self.total):
            self._drawn = now
            self._progress.refresh()

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _drawing(unit: str, leave: bool) -> "Progress":
    """The bar and its numbers, on standard error. Imported here, since most processes never draw one."""
    from rich import progress as parts

    if unit == "B":
        counted = (parts.DownloadColumn(), parts.TransferSpeedColumn())
    else:
        counted = (parts.MofNCompleteColumn(), parts.TextColumn(f"{unit}s"))
    columns = (
        parts.TextColumn("{task.description}"),
        parts.BarColumn(bar_width=None if unit == "B" else 24),
        parts.TaskProgressColumn(),
        *counted,
        parts.TimeRemainingColumn(compact=True),
        parts.TextColumn("{task.fields[note]}"),
    )
    return parts.Progress(
        *columns,
        console=console(sys.stderr),
        auto_refresh=False,
        transient=not leave,
        redirect_stdout=False,
        redirect_stderr=False,
    )
