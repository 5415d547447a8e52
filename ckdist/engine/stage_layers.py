"""The number of pipeline stages, and the layers of each.

Every function here is called by all ranks of a world together.
"""

import dataclasses
import functools
from collections.abc import Callable

from ckdist import native
from ckdist.comm.agreement import agree
from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.stage_ranks import ranks_of_stages
from ckdist.errors import ConfigError
from ckdist.layout import SINGLE, Layout, Range
from ckdist.mesh import Mesh
from ckdist.models.decoder import forward
from ckdist.program.tracer import Tracer, trace
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.loader import ShardLoader
from ckdist.weights.packed_type import weight_cost


def with_chosen_layout(config: EngineConfig, world: World, checkpoint: Checkpoint) -> EngineConfig:
    """The configuration with its number of stages. A collective call.

    `--layout auto` chooses the number, once for all restarts. It is the default over several hosts, unless a flag says
    how to divide the model.
    """
    divided = (
        config.pipeline_parallel_size
        or config.tensor_parallel_size
        or config.has_draft_model
        or config.prefill != "auto"
    )
    chooses = config.layout == "auto" or not (len(set(world.hosts)) == 1 or divided or config.experts != "auto")
    if not chooses or not checkpoint.spec.generates or checkpoint.spec.reads_whole:
        return dataclasses.replace(config, pipeline_parallel_size=config.pipeline_parallel_size or 1)
    from ckdist.engine.kept_choice import kept_stages

    return dataclasses.replace(config, pipeline_parallel_size=kept_stages(config, world, checkpoint))


def open_shares(config: EngineConfig, world: World, checkpoint: Checkpoint) -> tuple[int, ...]:
    """The relative shares of the ranks by --tensor-split; () if they are equal. A collective call."""
    if config.tensor_split == "even" and len(set(world.hosts)) == 1:
        return ()
    from ckdist.engine.kept_choice import kept_shares

    return kept_shares(config, world, checkpoint)


def layers_of_stages(
    config: EngineConfig,
    world: World,
    loader: ShardLoader,
    tracer: Callable[[Layout, Mesh], Tracer],
    shares: tuple[int, ...] = (),
) -> list[Range]:
    """The layers of each stage, the same on every rank. A collective call.

    `shares`: the ranks' relative shares of the model; (): all are equal.

    Raises ConfigError if the model or the job cannot have that many stages.
    """
    spec, count = loader.checkpoint.spec, config.pipeline_parallel_size
    if count == 1:
        return [(0, len(spec.layers))]
    from ckdist.layouts.stage_plan import check_stages, divide_layers

    check_stages(count, world.size, len(spec.layers))
    if spec.reads_whole:
        raise ConfigError(
            f"{spec.family} has an encoder, which allows no stages: leave --pipeline-parallel-size {count} out"
        )
    program = trace(forward, spec, SINGLE, Mesh(), tracer)
    agree(world, "model", program.digest())  # each stage compares only its own part
    speeds = [sum(shares[rank] for rank in ranks) for ranks in ranks_of_stages(world.size, count)] if shares else ()
    layers = divide_layers(program, count, native.isa(), functools.partial(weight_cost, loader), speeds)
    return [(begin, end) for begin, end in world.broadcast(layers)]
