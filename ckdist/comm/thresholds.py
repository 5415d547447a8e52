"""From which sizes on another algorithm is used: measured on this machine by `ckdist bench comm --tune`, kept in the
user's cache.
"""

import json
import os
import pathlib
from typing import NamedTuple


class Thresholds(NamedTuple):
    """In bytes, as native/comm/algorithms/collectives.h explains them. The same on all ranks: rank 0's are taken."""

    direct_bytes: int = 8 << 10
    transport_direct_bytes: int = 32 << 10
    leaders_bytes: int = 32 << 10


def cache_folder() -> pathlib.Path:
    """Where what was measured is kept, of each user. RuntimeError where a user has no home."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "ckdist"


def thresholds_path() -> pathlib.Path:
    """Where they are kept: one file per user."""
    return cache_folder() / "comm.json"


def load_thresholds() -> Thresholds:
    """What was measured here, or the defaults; a file that does not make sense is passed over."""
    try:
        values = json.loads(thresholds_path().read_text())
        found = {name: values[name] for name in Thresholds._fields if name in values}
        if all(type(n) is int and 0 <= n <= 1 << 30 for n in found.values()):
            return Thresholds(**found)
    except (OSError, ValueError, TypeError):
        pass
    return Thresholds()


def save_thresholds(thresholds: Thresholds) -> pathlib.Path:
    """Keeps them for later starts. The file; OSError where it cannot be written, RuntimeError without a home."""
    path = thresholds_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(thresholds._asdict(), indent=1) + "\n")
    return path
