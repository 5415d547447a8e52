"""Figures with matplotlib (`pip install 'ckdist[plot]'`)."""

import importlib
import importlib.util
import logging
import os
import pathlib
from typing import Any

from ckdist.errors import ConfigError

ENDINGS = (".svg", ".pdf", ".png")


def new_figure(width: float, height: float) -> Any:
    """An empty Figure of `width` x `height` inches. Raises ImportError if matplotlib is not installed."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it logs its cache of fonts
    return importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def plain_ticks(axis: Any) -> None:
    """Writes plain numbers at 1, 2 and 5 times each power of ten of a logarithmic axis."""
    ticker = importlib.import_module("matplotlib.ticker")
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(ticker.NullFormatter())


def check_path(path: str | os.PathLike[str]) -> None:
    """Raises ConfigError if the path has an unknown ending or no existing folder, or if matplotlib is not installed."""
    if not str(path).endswith(ENDINGS):
        raise ConfigError(f"a picture's file must end with {', '.join(ENDINGS)}, and is {str(path)[:200]!r}")
    if not pathlib.Path(path).parent.is_dir():
        raise ConfigError(f"the picture {str(path)[:200]} cannot be written: there is no such folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("a picture needs matplotlib, which is not installed: pip install 'ckdist[plot]'")


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes a figure in the format of the path's ending, whole or not at all.

    Raises the errors of `check_path`, and ConfigError if the file cannot be written.
    """
    check_path(path)
    target = pathlib.Path(path)
    part = target.with_name(f".part.{target.name}")
    try:
        figure.savefig(part)
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"the picture {target} cannot be written: {error.strerror or error}") from None
