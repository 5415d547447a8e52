"""Rank 0 of a job whose HTTP process started it: the engine's loop, without ports."""

import os
import signal

from ckdist.cli.serve import DRAIN_SIGNALS
from ckdist.cli.serve_rank_0 import STORING_SECONDS, load_engine, logged_lines, model_facts, task_of
from ckdist.cli.start_lines import parameters
from ckdist.comm.world_protocol import World
from ckdist.config.serve_config import ServeConfig
from ckdist.engine.coordinator import Coordinator
from ckdist.engine.core_turns import CoreTurns
from ckdist.engine.rank_reports import RankReports
from ckdist.engine.socket_directory import READY, TURNS


def core_turns() -> CoreTurns | None:
    """Returns the turns of the engines that share this one's cores. None: no other engine does."""
    path, _, number = os.environ.get(TURNS, "").rpartition(":")
    return CoreTurns(path, int(number)) if path else None


def serve(config: ServeConfig, world: World, directory: str, name: str) -> None:
    """Answers on the socket in `directory` until it is drained. Raises EngineError if a rank is lost."""
    turns = core_turns()
    with Coordinator(
        directory, {"id": name}, step_limit=config.comm_timeout * 4, drain_seconds=config.drain_timeout, turns=turns
    ) as coordinator:
        for number in DRAIN_SIGNALS:
            signal.signal(number, lambda *_: coordinator.request_drain())
        model, engine, tokenizer = load_engine(config, world)
        engine.scheduler.shares_cores = turns is not None
        lines = logged_lines(name, config, model)
        facts = {"parameters": parameters(model), "generates": model.spec.generates, "chats": bool(tokenizer.templates)}
        coordinator.begin(engine, RankReports(model), model_facts(config, model, engine.ranking) | facts)
        print(*lines, READY + task_of(bool(tokenizer.templates), model.spec), sep="\n", flush=True)

        def watch() -> None:
            """Checks the peers and the loader between two steps."""
            model.executable.check_peers()
            model.loader.check()

        with model.traced():
            coordinator.run(check_peers=watch)
            engine.finish_storing(STORING_SECONDS)
    model.close()  # after the coordinator, whose second thread reads the model's counters
    world.close()
