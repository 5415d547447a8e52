"""What every command that runs a model does around its work: start the world, load, let the other ranks work, close."""

import contextlib
import sys

from ckdist.comm.world import start_world
from ckdist.engine.launch import Model, load_model


def longer_context(tokens: int, spec) -> str:
    """What to do where `tokens` do not fit the context, as the remedy of an error."""
    return f"use --ctx-size {tokens}" if tokens <= spec.max_position else f"the model's longest is {spec.max_position}"


@contextlib.contextmanager
def model_session(config, world=None):
    """Yields the loaded model on rank 0; on the other ranks yields None after rank 0 is done with them.

    On an error nothing is closed: peers may be gone, and the process ends at once (see `ckdist.cli.main`).
    """
    world = world or start_world()
    model: Model = load_model(config, world, progress=world.rank == 0 and sys.stderr.isatty())
    if world.rank == 0:
        yield model
    else:
        model.executable.work()
        yield None
    model.close()
    world.close()
