"""What every command that runs a model does around its work: start the world, load, let the other ranks work, close."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TypeVar

from ckdist.comm.agreement import start_ranks
from ckdist.comm.protocol import World
from ckdist.config.engine import EngineConfig
from ckdist.engine.launch import Model, load_model
from ckdist.errors import CkdistError, UserError
from ckdist.hub.resolve import resolve
from ckdist.models.spec import ModelSpec

Config = TypeVar("Config", bound=EngineConfig)


def longer_context(tokens: int, spec: ModelSpec) -> str:
    """What to do where `tokens` do not fit the context, as the remedy of an error."""
    return f"use --ctx-size {tokens}" if tokens <= spec.max_position else f"the model's longest is {spec.max_position}"


def packed_first(config: Config) -> Config:
    """For a command that measures, or reads everything many times: all weights are packed before it begins, unless
    the user says otherwise.
    """
    return dataclasses.replace(config, repack="off") if config.repack == "auto" else config


@contextlib.contextmanager
def dismissing(model: Model, world: World) -> Iterator[None]:
    """A UserError within, on rank 0, ends the other ranks' work first: they are well, and wait for the next batch.

    Unless a step failed with it.
    """
    try:
        yield
    except UserError:
        if model.executable.failed:
            raise
        with contextlib.suppress(CkdistError):
            model.close()
            world.close()
        raise


@contextlib.contextmanager
def model_session(config: EngineConfig, world: World | None = None, measure: bool = False) -> Iterator[Model | None]:
    """Yields the loaded model on rank 0; on the other ranks yields None after rank 0 is done with them.

    `measure` as of `load_model`.

    On an error nothing is closed: peers may be gone, and the process ends at once (see `ckdist.cli.main`). But a
    mistake of the user's that rank 0 alone has noticed lets the others leave in order, so that the job's exit code is
    that of the mistake.
    """
    world = world or start_ranks(config)
    config = dataclasses.replace(config, model=resolve(config.model, world))
    model: Model = load_model(config, world, progress=world.rank == 0, measure=measure)
    if world.rank == 0:
        with model.traced(), dismissing(model, world):
            yield model
    else:
        model.executable.work()
        yield None
    model.close()
    world.close()
