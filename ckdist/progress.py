"""The bar that shows how far something long is, for whoever looks at a terminal; a pipe or a file never gets one."""

import sys

from tqdm import tqdm


def progress_bar(total: int, unit: str, what: str, shown: bool = True, leave: bool = False, start: int = 0) -> tqdm:
    """A bar from `start` to `total`, disabled unless `shown` and standard error is a terminal; bytes (unit B) with powers of 1000. One line, which goes unless `leave`."""
    shown = shown and sys.stderr is not None and sys.stderr.isatty()
    return tqdm(total=total, initial=start, unit=unit, unit_scale=unit == "B", desc=what, disable=not shown, leave=leave, smoothing=0.1, dynamic_ncols=True)
