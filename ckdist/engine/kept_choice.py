"""Choices by measurements that a restarted job takes over, so that its texts and its kept weights stay the same."""

import hashlib
import json
import logging
import os
from collections.abc import Callable

from ckdist.comm.bootstrap.launchers import AGAIN
from ckdist.comm.user_cache import read_kept, write_kept
from ckdist.comm.world import together
from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.layouts.layout_choice import choose_layout
from ckdist.layouts.rank_shares import rank_shares
from ckdist.weights.checkpoint import Checkpoint

log = logging.getLogger(__name__)


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


def kept_stages(config: EngineConfig, world: World, checkpoint: Checkpoint) -> int:
    """The number of stages by `--layout auto`. A collective call."""

    def choose() -> list[int]:
        choice = choose_layout(world, config, checkpoint)
        if world.rank == 0:
            log.info("layout: %s", choice.reason)
        return [choice.stages]

    key = [config.model, config.pipeline_parallel_size, config.tensor_parallel_size, config.threads]
    return kept_choice(world, "layout", key, choose)[0]


def kept_shares(config: EngineConfig, world: World, checkpoint: Checkpoint) -> tuple[int, ...]:
    """The relative shares of the ranks by `--tensor-split`. A collective call."""
    choose = lambda: list(together(world, lambda: rank_shares(config, world, checkpoint)))
    measures = config.tensor_split == "auto" and len(set(world.hosts)) > 1
    return tuple(kept_choice(world, "shares", [config.model, config.threads], choose) if measures else choose())
