"""`ckdist train CONFIG.toml`: trains a model on the ranks that a launcher started."""

import signal
from types import FrameType

from ckdist.config import TrainCommand
from ckdist.errors import ConfigError
from ckdist.train.config import load_config
from ckdist.train.trainer import StepReport, train


def run(command: TrainCommand) -> int:
    """Trains; 0, or 130 where a signal has ended it."""
    if command.file is None:
        raise ConfigError("which configuration? ckdist train CONFIG.toml, as examples/train_tiny.toml")
    config = load_config(command.file, command.overrides)
    begun: list[StepReport] = []
    stopping: list[int] = []  # the signal that was sent

    def ask(number: int, _frame: FrameType | None) -> None:
        """The first signal ends the training after its step, with a checkpoint; the second at once, and any before a
        step is done, since there is nothing to save.
        """
        if stopping or not begun:
            raise KeyboardInterrupt
        stopping.append(number)

    def note(report: StepReport) -> None:
        """A step is done; the first one is kept."""
        if not begun:
            begun.append(report)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    train(config, on_step=note, should_stop=lambda: bool(stopping))
    return 130 if stopping else 0
