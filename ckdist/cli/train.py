"""`ckdist train CONFIG.toml`: trains a model on the ranks that a launcher started."""

import signal

from ckdist.config import TrainCommand
from ckdist.errors import ConfigError
from ckdist.train.config import load_config
from ckdist.train.trainer import train


def run(command: TrainCommand) -> int:
    if command.file is None:
        raise ConfigError("which configuration? ckdist train CONFIG.toml, as examples/train_tiny.toml")
    config = load_config(command.file, command.set)
    begun, asked = [], []

    def ask(number, _):
        """The first signal ends the training after its step, with a checkpoint; the second at once, and any before a
        step is done, since there is nothing to save.
        """
        if asked or not begun:
            raise KeyboardInterrupt
        asked.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    train(config, on_step=lambda report: begun or begun.append(report), should_stop=lambda: bool(asked))
    return 130 if asked else 0
