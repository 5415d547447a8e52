"""`ckdist serve` with several models: starts the HTTP process, which starts a job per model, and waits for it."""

import os
import time
from dataclasses import replace

from ckdist import native
from ckdist.cli.command_ranks import wanted_ranks
from ckdist.cli.model_table import ModelEntry, base_of, read_table
from ckdist.cli.server_start import ANSWERING_SECONDS, handle_signals, open_listeners
from ckdist.comm.bootstrap.launchers import is_rank
from ckdist.config.serve_config import ServeConfig
from ckdist.errors import ConfigError
from ckdist.hub.resolve import resolve
from ckdist.layouts.memory_sizes import RESERVE, gigabytes
from ckdist.serve.api_keys import read_key_file
from ckdist.serve.notify import notify
from ckdist.serve.process import HttpProcess, absolute, adapter_name, overrides_of
from ckdist.serve.settings import HostedSettings
from ckdist.topology import this_machine

LOOK_SECONDS = 0.2


def run(config: ServeConfig) -> int:
    """Serves until it is stopped. Returns 0. Raises EngineError if the HTTP process fails."""
    if is_rank():
        raise ConfigError("several models have a job each, so start `ckdist serve` without mpirun or ckdist launch")
    limit = config.models_memory or native.lib.ckdist_available_memory() - RESERVE
    models, pulled = models_of(config)
    listeners = open_listeners(config)
    hosted = {"models": models, "pulled": pulled, "models_memory": limit}
    http = HttpProcess.start(config, "", "", "", listeners.http, listeners.metrics, more=listeners.more, own=hosted)
    handle_signals(config, listeners, http)
    http.wait_answering(ANSWERING_SECONDS)
    names = ", ".join(model.model_name for model in models)
    count = "1 model" if len(models) == 1 else f"{len(models)} models"
    most = f"{config.models_max} at once, " if config.models_max else ""
    print(f"{count}: {names}; {most}in at most {gigabytes(limit)}")
    print(f"serving {count} at {http.url}  try: curl {http.url}/v1/models", flush=True)
    notify("READY=1", f"STATUS=serving {names} at {http.url}")
    while http.poll() is None:
        time.sleep(LOOK_SECONDS)
    if failure := http.failure():
        raise failure
    http.stop()
    return 0


def models_of(config: ServeConfig) -> tuple[tuple[HostedSettings, ...], HostedSettings | None]:
    """Returns the models, and the settings of those that clients may pull, without name and path."""
    entries = read_table(config)
    keys = read_key_file(config.api_key_file) if config.api_key_file else ()
    if not config.allow_model_changes and not any(key.limits.models for key in keys):
        return hosted_models(entries), None
    unnamed = ModelEntry(name="", config=replace(base_of(config), threads=0))
    *models, pulled = hosted_models([*entries, unnamed])
    return tuple(models), replace(pulled, words=unnamed.words[2:])


def hosted_models(entries: list[ModelEntry]) -> tuple[HostedSettings, ...]:
    """Returns the models with their CPUs. Raises ConfigError if there are too few cores.

    Models with `threads` have cores of their own. All others share the remaining cores, and run one step at a time. So
    there are never more running threads than cores.
    """
    usable = os.sched_getaffinity(0)
    cpus_of: dict[int, list[int]] = {}
    for cpu in this_machine().cpus:
        if cpu.number in usable:
            cpus_of.setdefault(cpu.core, []).append(cpu.number)
    cores = [tuple(cpus) for _, cpus in sorted(cpus_of.items())]  # the CPUs of each core
    own = [_own_cores(entry) for entry in entries]
    shares = any(not count for count in own)
    if sum(own) + shares > len(cores):
        raise ConfigError(
            f"the threads of the models need {sum(own)} cores{', and the other models one' * shares}, of "
            f"{len(cores)}: give fewer threads, or leave them out, and models take turns"
        )
    shared = cores[sum(own) :]
    sharers = sum(not count for count in own)
    models = []
    for entry, count in zip(entries, own, strict=True):
        mine, cores = (cores[:count], cores[count:]) if count else (shared, cores)
        config = entry.config
        try:
            path = resolve(config.model) or ""
        except ConfigError as error:
            raise ConfigError(f"model {entry.name}: {error}") from None
        models.append(
            HostedSettings(
                model_name=entry.name,
                words=(*entry.words, f"--model={path}"),
                model=path,
                aliases=entry.aliases,
                overrides=overrides_of(config),
                defaults=config.request_defaults,
                memory=config.memory,
                cpus=tuple(cpu for cpus in mine for cpu in cpus),
                takes_turns=not count and sharers > 1,
                pinned=entry.pinned,
                keep_alive=config.keep_alive,
                at_start=entry.at_start,
                parallel=config.parallel,
                max_sequences=config.parallel + config.max_queue,
                adapter=adapter_name(config),
                adapters=tuple(config.named_adapters),
                prefill_file=absolute(config.prefill_file),
                slot_save_path=absolute(config.slot_save_path),
            )
        )
    return tuple(models)


def _own_cores(entry: ModelEntry) -> int:
    config = entry.config
    return max(config.threads, config.threads_batch if config.threads else 0) * wanted_ranks(config)
