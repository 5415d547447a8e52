"""Commands that start the ranks of their model themselves: `ckdist serve -tp 2`, without a launcher.

The process that was started becomes the supervisor (`ckdist.launcher`) of the same command as several ranks, of which
rank 0 has the terminal.
"""

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckdist.comm.bootstrap.launchers import is_rank
from ckdist.config.engine import EngineConfig
from ckdist.launcher.hosts import MAX_RANKS, Host
from ckdist.python_words import module_words
from ckdist.topology import this_machine

if TYPE_CHECKING:
    from ckdist.config.commands import TrainCommand

STOP_SECONDS = 86400.0  # what was told to end bounds that itself, as --drain-timeout does


def wanted_ranks(settings: object) -> int:
    """How many ranks a command asks for. ConfigError for a training whose configuration cannot be read."""
    if not isinstance(settings, EngineConfig):
        from ckdist.config.commands import TrainCommand

        return _of_training(settings) if isinstance(settings, TrainCommand) else 1
    if not settings.runs_model:
        return 1
    stages = settings.pipeline_parallel_size or 1
    return stages * (settings.tensor_parallel_size or max(1, min(this_machine().nodes_in_use(), MAX_RANKS) // stages))


def _of_training(command: "TrainCommand") -> int:
    """The ranks of a training's mesh, of one replica where nobody says how many: batches depend on that."""
    from ckdist.train.config import load_config

    if command.file is None:
        return 1
    config = load_config(command.file, command.overrides)
    return max(1, config.data_parallel_size) * config.pipeline_parallel_size * config.tensor_parallel_size


def run_ranks(settings: object, arguments: Sequence[str]) -> int | None:
    """Runs `ckdist arguments...` as the ranks that `settings` ask for; the exit code. None where one rank is asked for,
    or this process is a rank already: then the command is to be run here.
    """
    if is_rank() or (count := wanted_ranks(settings)) == 1:
        return None
    from ckdist.launcher.job import Job
    from ckdist.launcher.output import Output
    from ckdist.launcher.supervisor import Policy, Supervisor

    words = tuple(module_words("ckdist.cli.main", *arguments))
    job = Job(words, count, str(pathlib.Path.cwd()), captured=False)
    return Supervisor(job, [Host("localhost", count)], Policy(stop_seconds=STOP_SECONDS), Output()).run()
