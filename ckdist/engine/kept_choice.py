"""A choice by measurements that a restarted job takes over, so that its texts and its kept weights stay the same."""

import hashlib
import json
import os
from collections.abc import Callable

from ckdist.comm.user_cache import read_kept, write_kept
from ckdist.comm.world_protocol import World
from ckdist.engine.socket_directory import AGAIN


def kept_choice(world: World, name: str, key: object, choose: Callable[[], list[int]]) -> list[int]:
    """Returns `choose()`; after a restart, its result when the job began. A collective call.

    Args:
        name: Folder of the choice in the cache.
        key: All that the choice depends on, other than hosts and measurements.
    """
    digest = hashlib.sha256(json.dumps([world.hosts, key], default=str).encode()).hexdigest()
    file = f"{name}/{digest[:32]}.json"
    kept = world.broadcast(read_kept(file) if world.rank == 0 and AGAIN in os.environ else None)
    if isinstance(kept, list) and all(isinstance(number, int) for number in kept):
        return kept
    found = choose()
    if world.rank == 0:
        write_kept(file, found)
    return found
