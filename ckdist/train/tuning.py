"""Settings of a fine-tuning without a configuration file, chosen from the data, and its memory and time."""

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ckdist.layouts.memory_sizes import free_memory
from ckdist.mesh import Mesh
from ckdist.train.config import TrainConfig
from ckdist.train.data.batches import FileBatches
from ckdist.train.data.token_cache import TokenCache
from ckdist.train.data.token_rows import split
from ckdist.train.model import TrainedModel
from ckdist.train.training_data import rows_of
from ckdist.train.training_memory import memory_text, rank_bytes

MOST_LENGTH = 2048  # default of max_length is at most this
STEP_TOKENS = 4096  # of a replica
FEW_TOKENS = 512
STEPS_OF_EPOCH = 8  # a step has fewer tokens if an epoch would have fewer steps
FEW_STEPS, EPOCHS, MOST_EPOCHS = 60, 3, 20
HELD_OUT_FROM = 50  # records, from which a part is held out for validation
SHARE_OF_MEMORY = 0.9  # of the free memory that the settings may fill
# Share of the measured rate of products that a step reaches: SmolLM2 with LoRA, in bfloat16, on 1 to 16 cores.
EFFICIENCY = 0.4
FACTOR = 2  # by which the hours may be wrong, either way


@dataclass(frozen=True)
class Expected:
    """The cost of a training.

    Attributes:
        steps: Steps of the whole training.
        bytes: Memory of a rank, by purpose.
        operations: Operations of one rank's matrix products, over all steps.
        trained: Parameters that are trained.
        is_gguf: The base is a GGUF, so that all its weights are written as one.
    """

    steps: int
    bytes: Mapping[str, int]
    operations: float
    trained: int
    is_gguf: bool


def default_settings(
    cache: TokenCache, positions: int, full: bool, lora_r: int, max_length: int = 0, method: str = "sft"
) -> dict[str, Any]:
    """The settings that depend on the data: lengths, batches, epochs, rates.

    Args:
        positions: The model's most positions.
        max_length: The user's; 0: chosen.
        method: As of TrainConfig.
    """
    sizes = np.diff(cache.starts)
    longest = int(sizes.max()) if cache.learned is not None else MOST_LENGTH
    length = max_length or min(MOST_LENGTH, positions, max(128, -(-longest // 64) * 64))
    paired = method != "sft"  # a row has two sequences
    step = min(STEP_TOKENS, max(FEW_TOKENS, int(sizes.sum()) // STEPS_OF_EPOCH))
    records = sum(cache.report.forms.values())
    settings: dict[str, Any] = {
        "max_length": length,
        "per_device_train_batch_size": max(4, step // (2 * length)) if paired else max(1, step // length),
        "learning_rate": (2e-5 if full else 2e-4) / (10 if paired else 1),
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.03,
        "validation_split_percentage": 2.0 if records >= HELD_OUT_FROM else 0.0,
    }
    if not full:
        settings |= {"lora_r": lora_r, "lora_alpha": 2.0 * lora_r, "lora_target_modules": ["all-linear"]}
    return settings


def default_epochs(steps: int) -> float:
    """Epochs of `steps` steps each: more for little data, so that something is learned."""
    return float(min(MOST_EPOCHS, max(EPOCHS, math.ceil(FEW_STEPS / max(1, steps)))))


def steps_of(config: TrainConfig, cache: TokenCache, replicas: int, epochs: float) -> int:
    """Steps of `epochs` passes over the part of the data that is not held out."""
    documents, _ = split(cache, config.validation_split_percentage, config.seed)
    rows = rows_of(config, cache, documents)
    sizes = config.per_device_train_batch_size, config.gradient_accumulation_steps
    batches = FileBatches(rows, 0, replicas, *sizes, rows_of_step=config.global_batch_size)
    return batches.steps_left(epochs)


def fitted(
    config: TrainConfig, model: TrainedModel, mesh: Mesh, ranks_on_host: int, threads: int, may_change: bool = True
) -> tuple[TrainConfig, dict[str, int]]:
    """The first of some settings with the same steps whose memory is free, and its bytes on a rank.

    It recomputes activations, then divides a step into several batches. If nothing fits, the last one is returned.
    `threads`: of a rank. `may_change`: False keeps `config`.
    """
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    candidates = [config]
    if may_change and not config.activation_checkpointing:
        candidates.append(replace(config, activation_checkpointing=True))
    if may_change and config.per_device_train_batch_size > 1:
        candidates.append(replace(candidates[-1], per_device_train_batch_size=1, gradient_accumulation_steps=rows))
    free = SHARE_OF_MEMORY * free_memory(ranks_on_host)
    for candidate in candidates:
        program = model.lowered(candidate, mesh, candidate.gradient_accumulation_steps)
        needed = rank_bytes(candidate.optim, program, threads)
        needed["quantised weights"] = _stored_bytes(candidate, model)
        if sum(needed.values()) <= free or candidate is candidates[-1]:
            return candidate, needed
    raise AssertionError("the last candidate is returned")


def _stored_bytes(config: TrainConfig, model: TrainedModel) -> int:
    """Bytes of a quantised base's file, which stays in memory in its own type."""
    is_file = model.checkpoint is not None and model.checkpoint.format != "safetensors" and config.lora_r
    return Path(config.model_name_or_path).stat().st_size if is_file else 0


def expected(
    config: TrainConfig, model: TrainedModel, cache: TokenCache, replicas: int, needed: Mapping[str, int]
) -> Expected:
    """The steps, memory and operations of a training."""
    steps = config.max_steps if config.max_steps >= 0 else steps_of(config, cache, replicas, config.num_train_epochs)
    tokens = steps * config.batch_tokens * config.gradient_accumulation_steps
    if config.global_batch_size:
        tokens *= config.global_batch_size / (replicas * config.per_device_train_batch_size)
    learned = 1.0 if cache.learned is None else float(np.mean(cache.learned))
    attended = 12.0 * len(model.spec.layers) * model.spec.hidden_size * config.max_length / 2
    operations = (model.operations(tokens, learned * tokens) + attended * tokens) / config.sequence_parallel_size
    trained = sum(w.elements for w in model.weights)
    is_gguf = model.checkpoint is not None and model.checkpoint.format == "gguf"
    return Expected(steps, needed, operations, trained, is_gguf)


def description(config: TrainConfig, name: str, one: Expected, rate: float) -> Iterator[str]:
    """Lines about a training before it starts. `rate`: operations per second of one rank's products."""
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    what = "" if config.method == "sft" else f"{config.method}, "
    method = f"LoRA of rank {config.lora_r} on all linear layers" if config.lora_r else "all weights"
    yield f"model     {name}: {what}{method}, {one.trained / 1e6:.3g} M trained parameters"
    epochs = f"{config.num_train_epochs:g} epochs" if config.max_steps < 0 else "max_steps"
    unit = config.max_length if config.method == "sft" else f"2 x {config.max_length}"
    yield f"steps     {one.steps} ({epochs}); each has {rows} x {unit} tokens of every replica"
    yield (
        f"rate      {config.learning_rate:g}, {config.lr_scheduler_type}, warm-up {config.warmup_ratio:.0%}; "
        f"{config.validation_split_percentage:g} % of the data held out"
    )
    how = ", activations recomputed" if config.activation_checkpointing else ""
    yield f"memory    {memory_text(one.bytes)}{how}"
    hours = one.operations / (EFFICIENCY * rate) / 3600
    shown = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"
    yield f"time      about {shown}, or {FACTOR} times more or less ({rate / 1e9:.0f} GFLOP/s measured)"
    result = "adapter" if config.lora_r else "model.gguf" if one.is_gguf else "model"
    yield f"result    {Path(config.output_dir) / result}"


def as_toml(config: TrainConfig) -> str:
    """The settings that differ from the defaults, as a file for `ckdist train`."""
    lines = []
    written = functools.partial(json.dumps, ensure_ascii=False)  # TOML has no pairs of surrogates
    for name, value in config.as_dict().items():
        if isinstance(value, dict):
            inner = ", ".join(f"{key} = {written(one)}" for key, one in value.items())
            lines += [f"{name} = {{{inner}}}"] if inner else []
        elif value != TrainConfig.__dataclass_fields__[name].default:
            lines.append(f"{name} = {written(value)}")
    return "\n".join(lines) + "\n"


def entries(files: Sequence[str]) -> tuple[str, ...]:
    """The files as absolute patterns, so that the settings file works in any folder."""
    return tuple(str(Path(file).expanduser().absolute()) for file in files)
