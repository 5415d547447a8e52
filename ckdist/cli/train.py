"""`ckdist train CONFIG.toml`: trains a model on the ranks of a launcher."""

import signal
from types import FrameType

from ckdist.comm.world_protocol import World
from ckdist.config.commands import TrainCommand
from ckdist.errors import ConfigError
from ckdist.train.config import TrainConfig, load_config
from ckdist.train.trainer import train


def run(command: TrainCommand) -> int:
    """Trains as the file says."""
    if command.file is None:
        raise ConfigError("which configuration? ckdist train CONFIG.toml, as examples/train_tiny.toml")
    return trained(load_config(command.file, command.overrides))


def trained(config: TrainConfig, world: World | None = None) -> int:
    """Trains until the end or a signal. Returns 0, or 130 if a signal has ended it."""
    asked = signalled = False

    def ask(_number: int, _frame: FrameType | None) -> None:
        """Handles a signal.

        The first signal ends the training after its step, with a checkpoint. The second ends it at once, as does any
        signal before the first step, because there is nothing to save.
        """
        nonlocal signalled
        if signalled or not asked:
            raise KeyboardInterrupt
        signalled = True

    def should_stop() -> bool:
        """Returns whether a signal has come.

        No rank ends a step before every rank has called this in the step. A rank that has not called it yet may leave
        at once: no rank has a step to save.
        """
        nonlocal asked
        asked = True
        return signalled

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    train(config, should_stop=should_stop, world=world)
    return 130 if signalled else 0
