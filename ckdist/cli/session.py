"""The frame of commands that run a model: start the ranks, load, work, close."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TypeVar

from ckdist.comm.agreement import start_ranks
from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.loaded_model import Model
from ckdist.models.spec import ModelSpec

Config = TypeVar("Config", bound=EngineConfig)


def longer_context(tokens: int, spec: ModelSpec) -> str:
    """Returns the remedy for `tokens` that do not fit the context."""
    return f"use --ctx-size {tokens}" if tokens <= spec.max_position else f"the model's longest is {spec.max_position}"


def packed_first(config: Config) -> Config:
    """Turns `repack` off unless the user chose it: all weights are packed before the command begins.

    For commands that measure, or that read the weights many times.
    """
    return dataclasses.replace(config, repack="off") if config.repack == "auto" else config


@contextlib.contextmanager
def model_session(config: EngineConfig, world: World | None = None, measure: bool = False) -> Iterator[Model | None]:
    """Yields the loaded model on rank 0. The other ranks yield None after rank 0 is done with them.

    After an error nothing is closed: peers may be gone, and the process ends at once (see `ckdist.cli.main`). If only
    rank 0 notices a user's mistake, the other ranks end in order. The job's exit code is then that of the mistake.

    Args:
        measure: As in `load_model`.
    """
    world = world or start_ranks(config)
    from ckdist.hub.resolve import resolve

    config = dataclasses.replace(config, model=resolve(config.model, world))
    model: Model = load_model(config, world, progress=world.rank == 0, measure=measure)
    if world.rank == 0:
        with model.traced(), model.dismissing():
            yield model
    else:
        model.work()
        yield None
    model.close()
    world.close()
