"""Rank 0 of `ckdist serve`: its ports, the HTTP process, and the engine's loop.

The port is bound before any expensive work. The HTTP process answers 503 while the model loads.
"""

import contextlib
import logging
import math
import os
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from ckdist.cli.server_start import ANSWERING_SECONDS, Listeners, handle_signals, say_ready
from ckdist.cli.start_lines import log_map, parameter_facts, start_lines
from ckdist.comm.bootstrap.launchers import AGAIN
from ckdist.comm.world_protocol import World
from ckdist.config.serve_config import ServeConfig
from ckdist.engine.coordinator import Coordinator
from ckdist.engine.engine import Engine
from ckdist.engine.load_model import load_model
from ckdist.engine.loaded_model import Model
from ckdist.engine.model_engine import make_engine
from ckdist.engine.rank_reports import RankReports
from ckdist.engine.socket_directory import socket_directory
from ckdist.hub.bundled import BUNDLED
from ckdist.models.spec import ModelSpec
from ckdist.serve.process import HttpProcess
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.weights.stored_pooling import stored_pooling

if TYPE_CHECKING:  # few models rank documents
    from ckdist.weights.stored_ranking import Ranking

DRAINED_VARIABLE = "CKDIST_DRAINED"  # launch/drained sets it: with it mpirun may get SIGTERM

STORING_SECONDS = 5.0  # after a drain, for blocks that are not on disk yet

log = logging.getLogger(__name__)


def model_facts(config: ServeConfig, model: Model, ranking: "Ranking | None" = None) -> dict[str, str | int]:
    """Returns the facts about the model that the HTTP process needs.

    Returns:
        architecture, num_parameters, type, size_bytes: For clients that ask; the type is that of most parameters.
        pooling: The kind of pooling.
        sequences: Most texts in a step.
        scores: The function from a cross-encoder's output to a score; "" for other models.
        encodes: Whether an encoder reads prompts.
        rank_template: The question of a decoder that ranks documents, or "".
    """
    scorer, sequences = model.spec.scorer, model.plan.cache.max_sequences
    pooling = stored_pooling(model.checkpoint) if config.pooling == "auto" or scorer else config.pooling
    scores = "sigmoid" if ranking or (scorer and scorer.sigmoid) else "identity" if scorer else ""
    count, kind, size = parameter_facts(model)
    about = {"architecture": model.spec.family, "num_parameters": count, "type": kind, "size_bytes": size}
    template = ranking.template if ranking else ""
    embeds = {"pooling": pooling, "sequences": sequences, "scores": scores, "rank_template": template}
    return {**about, **embeds, "encodes": model.spec.encoder is not None}


def is_orphan(parent: int) -> bool:
    """Returns True if Open MPI's launcher, the process `parent`, has ended."""
    return "OMPI_COMM_WORLD_SIZE" in os.environ and os.getppid() != parent


def stop_line() -> str | None:
    """Returns the advice on stopping a job of Open MPI without interrupting streams.

    After SIGTERM, mpirun kills its ranks within half a second. Other launchers wait.
    """
    if "OMPI_COMM_WORLD_SIZE" not in os.environ or DRAINED_VARIABLE in os.environ:
        return None
    return f"To stop without cutting streams: kill -TERM {os.getpid()}"


def logged_lines(name: str, config: ServeConfig, model: Model) -> list[str]:
    """Returns the lines about the start, and logs where ranks are placed. A collective call."""
    lines, advice = start_lines(name, model)
    log_map(model)
    advice, exchanges = advice[:1], model.executable.communicator.exchanges
    if exchanges and model.executable.stages is None:
        from ckdist.layouts.layout_choice import layout_advice

        advice += layout_advice(model.world, config, model.checkpoint, model.plan.threads, exchanges)
    for line in advice:
        log.warning("%s", line)
    return lines


def task_of(chats: bool, spec: ModelSpec) -> str:
    """Returns the path under /v1 to try a model with."""
    if spec.scorer is not None:
        return "rerank"
    if not spec.generates:
        return "embeddings"
    return "chat/completions" if chats and spec.encoder is None else "completions"


def load_engine(config: ServeConfig, world: World) -> tuple[Model, Engine, Tokenizer]:
    """Loads the model and makes rank 0's engine. A collective call: other ranks call `load_model`."""
    model = load_model(config, world, progress=True, embeddings=True)
    with model.dismissing():
        limit = config.max_step_ms / 1000 or math.inf
        engine, tokenizer = make_engine(model, config, config.max_queue + config.parallel, limit)
        if engine.grammars is not None and tokenizer.eos_token_ids:
            engine.grammars.prepare(wait=AGAIN not in os.environ)
        pooling = stored_pooling(model.checkpoint) if config.pooling == "auto" else config.pooling
        if pooling == "rank" and model.spec.scorer is None:
            from ckdist.weights.stored_ranking import stored_ranking

            engine.ranking = stored_ranking(model.checkpoint, tokenizer)
    return model, engine, tokenizer


def serve(
    config: ServeConfig,
    world: World,
    listeners: Listeners,
    name: str,
    cpus: Collection[int],
    parent: int,
    on_ready: Callable[[str, Callable[[], None]], None] | None = None,
) -> None:
    """Serves until the server is stopped. Raises EngineError if the HTTP process fails.

    Args:
        name: The model's name for clients.
        cpus: The CPUs that the HTTP process may use.
        parent: The process that started this one.
        on_ready: Takes the URL and a function that ends the server. The lines about the start are not printed then.
    """
    with contextlib.ExitStack() as held:
        directory = held.enter_context(socket_directory())
        coordinator = held.enter_context(
            Coordinator(directory, {"id": name}, step_limit=config.comm_timeout * 4, drain_seconds=config.drain_timeout)
        )
        path, (first, metrics, more) = os.fspath(config.model or BUNDLED), listeners
        http = HttpProcess.start(config, coordinator.address, path, name, first, metrics, cpus, more=more)
        held.callback(http.stop)
        handle_signals(config, listeners, http, coordinator.request_drain)
        model, engine, tokenizer = load_engine(config, world)
        lines = logged_lines(name, config, model)
        coordinator.begin(engine, RankReports(model), model_facts(config, model, engine.ranking))
        http.wait_answering(ANSWERING_SECONDS)
        if on_ready is not None:
            on_ready(http.url, coordinator.request_drain)
        else:
            task = task_of(bool(tokenizer.templates), model.spec)
            say_ready(config, listeners, http, name, lines, task, stop_line())

        def watch() -> None:
            """Checks the peers, the launcher, the loader and the HTTP process between two steps."""
            model.executable.check_peers()
            if is_orphan(parent):  # it was killed, and nothing else would end its ranks
                coordinator.request_drain()
            model.loader.check()
            if failure := http.failure():
                raise failure
            if http.poll() == 0:  # it has drained
                coordinator.request_drain()

        with model.traced():
            coordinator.run(check_peers=watch)
            engine.finish_storing(STORING_SECONDS)
        http.stop(config.drain_timeout)
    model.close()  # after the coordinator, whose second thread reads the model's counters
    world.close()
