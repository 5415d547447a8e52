"""The ranks of `ckdist serve`: rank 0 runs the HTTP process and the engine's loop, and the others compute."""

import dataclasses
import os
import signal

from ckdist.cli.frozen_import import frozen_import
from ckdist.cli.serve import DRAIN_SIGNALS
from ckdist.cli.server_start import model_name, open_listeners
from ckdist.cli.start_lines import log_map, start_lines
from ckdist.comm.agreement import start_ranks
from ckdist.comm.world import together
from ckdist.comm.world_protocol import World
from ckdist.config.serve_config import ServeConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.rank_reports import RankReports
from ckdist.engine.socket_directory import DIRECTORY


def host_cpus(world: World) -> set[int]:
    """Returns on rank 0 the CPUs that this host's ranks were started with. A collective call."""
    masks = world.gather((world.hosts[world.rank], sorted(os.sched_getaffinity(0))))
    return {cpu for host, mask in masks if host == world.hosts[world.rank] for cpu in mask}


def work(config: ServeConfig, world: World) -> None:
    """Runs a rank other than 0.

    A signal from a launcher or a terminal reaches all ranks. These ranks ignore it: rank 0 drains and then ends them.
    """
    for number in DRAIN_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    model = load_model(config, world, embeddings=True)
    start_lines("", model)
    log_map(model)
    RankReports(model)
    model.work()
    model.close()
    world.close()


def run(config: ServeConfig) -> int:
    """Runs this process's rank until the server is stopped. Returns 0. Raises EngineError if the HTTP process fails.

    With DIRECTORY in the environment, the engine answers on a socket in that folder, and there is no HTTP process.
    """
    parent = os.getppid()
    world = start_ranks(config)
    rank_0 = frozen_import("ckdist.cli.serve_rank_0") if world.rank == 0 else None
    directory = os.environ.get(DIRECTORY)
    listeners = together(world, lambda: None if directory else open_listeners(config) if rank_0 else None)
    cpus = host_cpus(world)
    name = config.alias or model_name(config)
    if config.model is not None:
        from ckdist.hub.resolve import resolve

        config = dataclasses.replace(config, model=resolve(config.model, world))
    if rank_0 is None:
        work(config, world)
    elif directory:
        frozen_import("ckdist.cli.engine_rank_0").serve(config, world, directory, name)
    else:
        rank_0.serve(config, world, listeners, name, cpus, parent)
    return 0
