"""Sizes from which another collective algorithm is used. `ckdist bench comm --tune` measures and saves them."""

import json
import os
import pathlib
from typing import NamedTuple


class Thresholds(NamedTuple):
    """In bytes; native/comm/algorithms/collectives.h explains them. Rank 0's values count on all ranks."""

    direct_bytes: int = 8 << 10
    transport_direct_bytes: int = 32 << 10
    leaders_bytes: int = 32 << 10


def cache_folder() -> pathlib.Path:
    """The user's cache folder of measurements. Raises RuntimeError if the user has no home."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "ckdist"


def thresholds_path() -> pathlib.Path:
    """The file of the saved thresholds."""
    return cache_folder() / "comm.json"


def load_thresholds() -> Thresholds:
    """Returns the saved thresholds, or the defaults if there is no valid file."""
    try:
        values = json.loads(thresholds_path().read_text())
        found = {name: values[name] for name in Thresholds._fields if name in values}
        if all(type(n) is int and 0 <= n <= 1 << 30 for n in found.values()):
            return Thresholds(**found)
    except (OSError, ValueError, TypeError):
        pass
    return Thresholds()


def save_thresholds(thresholds: Thresholds) -> pathlib.Path:
    """Saves thresholds for later starts and returns the file. Raises OSError, or RuntimeError without a home."""
    path = thresholds_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(thresholds._asdict(), indent=1) + "\n")
    return path
