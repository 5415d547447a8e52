"""The places of ranks in the pipeline stages of a job.

The mesh of a job is pp x tp, with hosts outermost, so the ranks of a stage are consecutive and usually on one host.
Rank 0 schedules and samples. Its stage is the last one, so logits are made on the rank that samples, and the next batch
carries the tokens to the first stage. Rank 0 sends batches to all ranks, and each stage sends rows to the next one:

    ranks 0, 1    last stage        rows from ranks 4, 5
    ranks 2, 3    first stage       rows to ranks 4, 5
    ranks 4, 5    second stage      rows from ranks 2, 3, and to ranks 0, 1
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckdist.comm.world_protocol import World
from ckdist.layout import Range
from ckdist.layouts.memory_sizes import gigabytes
from ckdist.mesh import Mesh
from ckdist.models.spec import ModelSpec
from ckdist.program.pipeline_stage import Stage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageRank:
    """The place of a rank in the stages of a job."""

    stage: Stage
    world: World  # the ranks of the stage
    previous: int = -1  # the job's rank that sends rows to this one; -1: none
    next: int = -1  # the job's rank that receives rows from this one; -1: none
    shares: tuple[int, ...] = ()  # relative shares of the stage's ranks; (): all are equal

    def part_of(self, spec: ModelSpec) -> ModelSpec:
        """The model with the layers of this rank's stage."""
        begin, end = self.stage.layers
        return replace(spec, layers=spec.layers[begin:end])


def ranks_of_stages(ranks: int, count: int) -> list[list[int]]:
    """The job's ranks of each of `count` stages."""
    each = ranks // count
    return [[*range(at % count * each, (at % count + 1) * each)] for at in range(1, count + 1)]


def stage_rank(world: World, layers: Sequence[Range], shares: Sequence[int] = ()) -> StageRank:
    """The place of this rank in a job with one stage for each range in `layers`.

    `shares`: the relative shares of the job's ranks; (): all are equal.
    """
    count = len(layers)
    if count == 1:
        return StageRank(Stage(0, 1, layers[0]), world, shares=tuple(shares))
    from ckdist.comm.group_world import GroupWorld

    mesh = Mesh.of_job(world.size, world.rank, dp=1, pp=count, tp=world.size // count)
    number = (mesh.index("pp") - 1) % count
    peers = [place.rank for place in mesh.along("pp")]  # the rank with the same index in each stage
    stage, at = Stage(number, count, layers[number]), mesh.index("pp")
    return StageRank(
        stage,
        GroupWorld(world, mesh.group("tp")),
        -1 if stage.first else peers[at - 1],
        -1 if stage.last else peers[(at + 1) % count],
        tuple(shares[rank] for rank in mesh.group("tp")) if shares else (),
    )


def stage_lines(ranks: Sequence[tuple[int, int, int, int]]) -> list[str]:
    """One line per stage: its parts and its ranks.

    `ranks`: for each rank (number of its stage, first layer, end of the layers, bytes of weights).
    """
    count, lines = max(number for number, *_ in ranks) + 1, []
    for number in range(count):
        own = [rank for rank, (other, *_) in enumerate(ranks) if other == number]
        _, begin, end, _ = ranks[own[0]]
        layers = f"layer {begin}" if end == begin + 1 else f"layers {begin} to {end - 1}"
        parts = [*(["embedding"] if number == 0 else []), layers, *(["head"] if number == count - 1 else [])]
        names = f"rank{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
        size = gigabytes(sum(ranks[rank][3] for rank in own))
        lines.append(f"stage {number} of {count}: {', '.join(parts)}, {size} of weights on {names}")
    return lines


def log_stages(world: World, rank: StageRank, weight_bytes: int) -> None:
    """Logs the layers of each stage. A collective call."""
    stage = rank.stage
    rows = world.gather([stage.number, *stage.layers, weight_bytes])
    for line in stage_lines(rows) if world.rank == 0 and stage.count > 1 else ():
        log.debug("%s", line)
