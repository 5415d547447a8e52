"""Output on a terminal: colours that can be switched off, and tables that fit its width.

A stream that is no terminal gets plain text. NO_COLOR (https://no-color.org) and TERM=dumb switch colours off.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

RESET = "\x1b[0m"
WIDEST = 1000  # columns
STYLES = {"error": "\x1b[1;31m", "strong": "\x1b[1m", "quiet": "\x1b[2m", "user": "\x1b[1;36m", "learned": "\x1b[1;32m"}


def is_terminal(stream: TextIO | None) -> bool:
    """True if `stream` is a terminal. False for None and for a closed stream."""
    return stream is not None and not stream.closed and stream.isatty()


def has_colours(stream: TextIO | None) -> bool:
    """True if `stream` is a terminal that wants colours."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in ("", "dumb")


def styled(text: str, style: str, stream: TextIO | None) -> str:
    """`text` in one of STYLES if `stream` has colours, else `text`."""
    return f"{STYLES[style]}{text}{RESET}" if has_colours(stream) else text


def console(stream: TextIO, columns: int | None = None) -> "Console":
    """A rich console over `stream` that does not highlight numbers and paths.

    Args:
        columns: Width if `stream` is no terminal, or one of unknown size, such as mpirun's. None: rich's default, 80.
    """
    from rich.console import Console

    width, height = columns, None
    if is_terminal(stream):
        with contextlib.suppress(OSError, ValueError):  # rich takes 80 columns for a dumb terminal, however wide it is
            size = os.get_terminal_size(stream.fileno())
            width, height = size.columns or columns, size.lines or None
    plain = not has_colours(stream)
    return Console(file=stream, width=width, height=height, no_color=plain, highlight=False, markup=False)


def print_table(names: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Prints `rows` under `names` to standard output. On a terminal, long cells are wrapped to its width.

    Args:
        right: Names of the columns that are aligned to the right.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console(sys.stdout, WIDEST).print(table)
