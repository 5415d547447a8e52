"""`ckdist tune -m MODEL FILE...`: fine-tunes a model with settings that follow from its data, and prints them first."""

import contextlib
import logging
import pathlib
from dataclasses import replace
from typing import NamedTuple

from ckdist.cli.train import trained
from ckdist.comm.world import start_world, together
from ckdist.comm.world_protocol import World
from ckdist.config.tuning_commands import TuneCommand
from ckdist.errors import ConfigError
from ckdist.hub.resolve import resolve
from ckdist.regular_file import write_synced
from ckdist.tokens.tried import load_tried
from ckdist.topology import default_threads, place
from ckdist.topology.arithmetic import arithmetic_rate
from ckdist.train import tuning
from ckdist.train.config import TrainConfig, from_mapping, override
from ckdist.train.data.chats import ChatProcess
from ckdist.train.data.data_files import find_files
from ckdist.train.data.token_cache import TokenCache
from ckdist.train.longer_context import parse
from ckdist.train.model import open_model
from ckdist.train.ranks import training_mesh
from ckdist.train.trainer import PEAK_FORMATS
from ckdist.train.training_data import cached_tokens
from ckdist.weights.checkpoint import open_checkpoint

LITTLE_HELD_OUT = 10.0  # per cent of little data that are held out for --early-stopping and --samples
EVALUATIONS = 10  # of an epoch, with one of these
log = logging.getLogger(__name__)
SETTINGS_FILE = "train.toml"  # in the output folder: the settings, for `ckdist train`


def run(command: TuneCommand) -> int:
    """Plans on rank 0, prints the plan, and trains on all ranks. Returns 0, or 130 after a signal."""
    world = start_world(command.encrypt)
    model = resolve(command.model, world) or ""
    own = default_threads(world)
    plan = together(world, lambda: _planned(command, model, world, own) if world.rank == 0 else None)
    config = from_mapping(world.broadcast(plan.config.as_dict() if plan else None), "ckdist tune")
    threads = config.threads or own
    cpus = place(world, threads).cpus
    rate = min(world.gather(arithmetic_rate(threads, cpus, PEAK_FORMATS[config.bf16])))
    if plan:
        report = plan.report if command.dry_run else ()  # a training logs it, too
        for line in (*report, *tuning.description(config, str(command.model), plan.cost, rate)):
            log.info("%s", line)
    code = 0 if command.dry_run else trained(config, world)
    world.close()
    return code


class Plan(NamedTuple):
    """The settings of a training, its cost, and the report of its data."""

    config: TrainConfig
    cost: tuning.Expected
    report: tuple[str, ...]


def _planned(command: TuneCommand, model: str, world: World, threads: int) -> Plan:
    """Chooses the settings and writes them to the output folder. Not a collective call.

    `threads`: of a rank, unless the settings name others.
    """
    config, cache = _chosen(command, model, world)
    mesh = training_mesh(config, world.size, world.rank)
    config = replace(config, model_name_or_path=model)
    opened = open_model(config)
    is_left_open = not any(text.partition("=")[0].strip() in BATCH_FIELDS for text in command.set)
    config, needed = tuning.fitted(config, opened, mesh, world.local_size, config.threads or threads, is_left_open)
    if config.method == "grpo" and opened.lora is not None:
        from ckdist.train.rollouts import sampling_bytes

        needed = {**needed, "sampling engine": sampling_bytes(config, pathlib.Path(model), opened.lora)}
    cost = tuning.expected(config, opened, cache, mesh.size("dp"), needed)
    config = replace(config, model_name_or_path=command.model or "")
    if not command.dry_run:
        write_synced(pathlib.Path(config.output_dir) / SETTINGS_FILE, tuning.as_toml(config).encode())
    return Plan(config, cost, tuple(cache.report.lines()))


BATCH_FIELDS = ("per_device_train_batch_size", "gradient_accumulation_steps", "activation_checkpointing")


def _chosen(command: TuneCommand, model: str, world: World) -> tuple[TrainConfig, TokenCache]:
    """The settings before those that depend on memory, and the tokens."""
    name = str(command.model).rstrip("/").rpartition("/")[2].removesuffix(".gguf").replace(":", "-")
    stem = pathlib.Path(command.files[0].rstrip("/")).name.partition(".")[0] or "data"
    stem = "data" if any(character in stem for character in "*?[") else stem
    values = {
        "model_name_or_path": str(command.model),
        "train_file": tuning.entries(command.files),
        "output_dir": command.output or f"{name}-{stem}",
        "bad_lines": "skip" if command.skip_bad else "error",
        "sequence_parallel_size": command.sequence_parallel_size,
        "encrypt": command.encrypt,
        "method": command.method,
        **({"beta": command.beta} if command.beta else {}),
        **({"rope_scaling": parse(command.rope_scaling)} if command.rope_scaling else {}),
        **({"teacher_file": str(pathlib.Path(command.teacher).absolute())} if command.teacher else {}),
    }
    given = values | ({} if command.full else {"lora_r": command.lora_r})
    for text in command.set:
        override(given, text)
    asked = from_mapping(given, "ckdist tune")  # unknown fields and wrong values are refused before anything is read
    replica = asked.sequence_parallel_size * asked.tensor_parallel_size * asked.pipeline_parallel_size
    values["data_parallel_size"] = max(1, world.size // replica)
    if asked.encrypt != command.encrypt:  # the ranks are connected already
        raise ConfigError(f"ckdist tune: write --encrypt {asked.encrypt}, not --set encrypt={asked.encrypt}")
    cache = _tokens(asked, model)
    spec = open_checkpoint(model).spec
    values |= tuning.default_settings(
        cache, spec.max_position, command.full, command.lora_r, command.max_length, asked.method
    )
    if command.learning_rate:
        values["learning_rate"] = command.learning_rate
    if command.early_stopping or command.samples:
        held = values["validation_split_percentage"] or LITTLE_HELD_OUT
        values |= {"early_stopping": command.early_stopping, "samples": command.samples}
        values |= {"eval_steps": 1, "validation_split_percentage": held}
    for text in command.set:
        override(values, text)
    config = from_mapping(values, "ckdist tune")
    if "num_train_epochs" not in given and config.max_steps < 0:
        epochs = command.epochs or tuning.default_epochs(tuning.steps_of(config, cache, config.data_parallel_size, 1.0))
        config = replace(config, num_train_epochs=epochs)
    steps = tuning.steps_of(config, cache, config.data_parallel_size, 1.0)
    if "logging_steps" not in given:
        config = replace(config, logging_steps=max(1, min(10, steps // 2)))
    if config.eval_steps and "eval_steps" not in given:
        config = replace(config, eval_steps=max(1, steps // EVALUATIONS))
    return config, cache


def _tokens(config: TrainConfig, model: str) -> TokenCache:
    """The tokens, in the cache that the training uses."""
    folder = pathlib.Path(config.tokenizer_name or model)
    with contextlib.closing(ChatProcess(folder)) as chats:
        files = find_files(config.train_file, lambda line: log.warning("%s", line))
        cache = cached_tokens(config, files, load_tried(folder), chats, progress=True)
    if cache.learned is not None and not cache.learned.any():
        raise ConfigError(f"{files[0]} has no answer to learn")
    return cache
