"""Starts the ranks of a command without a launcher: `ckdist serve -tp 2`.

The first process becomes the supervisor (`ckdist.launcher`) of the same command as several ranks. Rank 0 has the
terminal.
"""

import math
import pathlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckdist.comm.bootstrap.launchers import MAX_RANKS, is_rank
from ckdist.config.engine_config import EngineConfig
from ckdist.python_words import module_words
from ckdist.topology import this_machine

if TYPE_CHECKING:
    from ckdist.config.commands import TrainCommand

SHARDS = re.compile(r"\s*((?:tensor|pipeline)_parallel_size)\s*=\s*([1-9]\d{0,5})\s*", re.ASCII)  # of --set
STOP_SECONDS = 86400.0  # practically none: a command limits its own end, as --drain-timeout does


def wanted_ranks(settings: object) -> int:
    """Returns the number of ranks that a command needs. Raises ConfigError if a training file is unreadable."""
    if not isinstance(settings, EngineConfig):
        from ckdist.config.commands import TrainCommand
        from ckdist.config.tuning_commands import TuneCommand

        if isinstance(settings, TuneCommand):
            matches = [match for match in map(SHARDS.fullmatch, settings.set) if match]
            shards = math.prod({str(match[1]): int(match[2]) for match in matches}.values())
            return (settings.data_parallel_size or 1) * settings.sequence_parallel_size * shards
        return _training_ranks(settings) if isinstance(settings, TrainCommand) else 1
    if not settings.runs_model:
        return 1
    stages = settings.pipeline_parallel_size or 1
    return stages * (settings.tensor_parallel_size or max(1, min(this_machine().nodes_in_use(), MAX_RANKS) // stages))


def _training_ranks(command: "TrainCommand") -> int:
    from ckdist.train.config import load_config

    if command.file is None:
        return 1
    config = load_config(command.file, command.overrides)
    # One replica unless the file gives a number: batches depend on it.
    replica = config.sequence_parallel_size * config.pipeline_parallel_size * config.tensor_parallel_size
    return max(1, config.data_parallel_size) * replica


def run_ranks(settings: object, arguments: Sequence[str]) -> int | None:
    """Runs `ckdist arguments...` as the ranks that `settings` need.

    Returns:
        The exit code. None if the command must run in this process: it needs one rank, or this process is a rank.
    """
    if arguments[0] == "serve":
        from ckdist.cli.serve import has_own_ranks
        from ckdist.config.serve_config import ServeConfig

        if isinstance(settings, ServeConfig) and not has_own_ranks(settings):
            return None
    if is_rank() or (count := wanted_ranks(settings)) == 1:
        return None
    from ckdist.cli.parent_server import has_parent_server, may_restart
    from ckdist.launcher.hosts import Host
    from ckdist.launcher.job import Job
    from ckdist.launcher.keeper import Keeper
    from ckdist.launcher.rank_output import Output
    from ckdist.launcher.supervisor import Policy, Supervisor

    words = tuple(module_words("ckdist.cli.main", *arguments))
    job = Job(words, count, str(pathlib.Path.cwd()), captured=False)
    policy, keeper = Policy(stop_seconds=STOP_SECONDS), Keeper.inherited()
    ask = may_restart if has_parent_server() else None
    return Supervisor(job, [Host("localhost", count)], policy, Output(), keeper=keeper, may_restart=ask).run()
