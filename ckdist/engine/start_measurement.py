"""A measurement at the start of a job that is kept for later starts."""

import hashlib
import json
import math
from collections.abc import Callable
from typing import Any

from ckdist import native
from ckdist.comm.user_cache import read_kept, write_kept
from ckdist.engine.loaded_model import Model
from ckdist.layouts.prefill_choice import Measured


def kept_or_measured(
    folder: str, model: Model, key: object, remeasure: bool, measure: Callable[[], list[Measured]]
) -> tuple[list[Measured], bool]:
    """Returns the rows of `measure`, and whether an earlier start measured them. A collective call.

    Args:
        folder: Folder of the cache.
        key: All that a kept result depends on, other than this library.
        remeasure: Measure even if there is a kept result.
        measure: Rank 0 calls it, while the other ranks are in `work()`. Rows are kept if all are sure.
    """
    world, executable = model.world, model.executable
    built = hashlib.sha256(native.LIBRARY.read_bytes()).hexdigest()
    whole = json.dumps([built, native.isa(), key], sort_keys=True)
    name = f"{folder}/{hashlib.sha256(whole.encode()).hexdigest()[:32]}.json"
    rows = sound(read_kept(name)) if world.rank == 0 and not remeasure else None
    kept = rows is not None
    if world.broadcast(rows is None):
        with model.loader.held():
            if world.rank:
                executable.work()
            else:
                rows = measure()
                executable.stop()
                if rows and all(faster is not None for *_, faster in rows):
                    write_kept(name, rows)
        executable.stats(reset=True)  # measured steps do not count, on any rank
    return world.broadcast(rows), bool(world.broadcast(kept))


def sound(rows: Any) -> list[Measured] | None:
    """Rows of a file; None if they are invalid."""
    try:
        found: list[Measured] = [(int(size), float(ratio), bool(faster)) for size, ratio, faster in rows]
    except (ValueError, TypeError, OverflowError):
        return None
    return found if found and all(size > 0 and 0 < ratio < math.inf for size, ratio, _ in found) else None
