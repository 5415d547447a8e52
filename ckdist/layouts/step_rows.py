"""The memory of the rows of a step, if a mixture of experts has more than usual."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.layouts.memory_sizes import WeightBytes, free_memory, gigabytes
from ckdist.layouts.rank_plan import step_tokens
from ckdist.models.spec import LEAST_UBATCH, ModelSpec
from ckdist.program.lowered import SLOTS, Lowered

log = logging.getLogger(__name__)

ROWS_SHARE = 0.125  # fraction of the memory without weights that rows may take


def fitting_step(
    config: EngineConfig, spec: ModelSpec, world: World, weights: WeightBytes, lowered: Sequence[Lowered]
) -> tuple[EngineConfig, int]:
    """Halves the usual tokens of a step until their rows fit the memory. A collective call.

    Returns:
        The configuration, with --ubatch-size if it is less than usual, and the bytes of the rows after LEAST_UBATCH.
    """
    usual = fitting = step_tokens(config, spec)
    each = max(one.arena_bytes + 4 * SLOTS * one.exchange_floats for one in lowered) // usual  # bytes of one row
    room = max(0, free_memory(world.local_size, config.own_memory, weights.kept) - weights.total)
    found = world.gather([each, room])
    while fitting > LEAST_UBATCH and any(fitting * each > ROWS_SHARE * room for each, room in found):
        fitting = max(LEAST_UBATCH, fitting // 2)
    if fitting == usual:
        return config, (fitting - LEAST_UBATCH) * each
    if world.rank == 0:
        rows, free = max(found, key=lambda row: row[0] * usual - ROWS_SHARE * row[1])
        log.warning(
            "steps have %d tokens, not %d: rows would take %s, and %s are free after the weights; -ub %d demands them",
            *(fitting, usual, gigabytes(rows * usual), gigabytes(free), usual),
        )
    return replace(config, ubatch_size=fitting), (fitting - LEAST_UBATCH) * each
