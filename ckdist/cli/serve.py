"""`ckdist serve`: with several models, as ranks of a launcher, or as an engine that is restarted if it ends."""

import os
import signal

from ckdist.cli.frozen_import import frozen_import
from ckdist.comm.bootstrap.launchers import is_rank
from ckdist.config.serve_config import ServeConfig
from ckdist.engine.socket_directory import DIRECTORY
from ckdist.errors import ConfigError

DRAIN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # mpirun forwards SIGUSR1 and keeps running


def has_own_ranks(config: ServeConfig) -> bool:
    """Returns True if this process is a rank or starts ranks. If not, it starts another process for the engine."""
    return not config.is_router and (config.no_restart or is_rank() or DIRECTORY in os.environ)


def run(config: ServeConfig) -> int:
    """Serves until it is stopped. Returns 0, or the exit code of an engine that does not start.

    Raises EngineError if the HTTP process or the engine fails.
    """
    for flag, value in (("--models-memory", config.models_memory), ("--keep-alive", config.keep_alive)):
        if value is not None and not config.is_router:
            raise ConfigError(f"{flag} is for several models: give --models, a second -m, or --models-max 1")
    module = "serve_models" if config.is_router else "serve_ranks" if has_own_ranks(config) else "serve_restarting"
    return frozen_import(f"ckdist.cli.{module}").run(config)
