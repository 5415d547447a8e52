"""Opens the data of a training on every rank: training batches, validation rows, and warnings about them."""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ckdist.comm.agreement import agree
from ckdist.comm.world import together
from ckdist.comm.world_protocol import World
from ckdist.errors import ConfigError
from ckdist.mesh import Mesh
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.train.batch_source import BatchSource
from ckdist.train.config import TrainConfig
from ckdist.train.data.batches import EVAL_ROWS, FileBatches, OwnBatches
from ckdist.train.data.chats import ChatProcess
from ckdist.train.data.data_files import find_files, find_source
from ckdist.train.data.preference_rows import PreferenceRows, RewardRows
from ckdist.train.data.preferences import KINDS
from ckdist.train.data.prompt_rows import PromptRows
from ckdist.train.data.token_cache import TokenCache, open_cache
from ckdist.train.data.token_rows import Rows, split
from ckdist.train.data.truncation import count_truncated, describe_truncation
from ckdist.train.ranks import full_replicas

if TYPE_CHECKING:
    from ckdist.train.data.teacher_file import TeacherFile

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingData:
    """The data of a training."""

    batches: FileBatches | OwnBatches
    validation: Rows | None = None  # rows of the validation loss; None if there is none
    digest: str = ""  # of the training tokens

    @property
    def rows(self) -> list[Rows]:
        """The rows of training, then those of validation, as far as there are any."""
        training = self.batches.rows if isinstance(self.batches, FileBatches) else None
        return [rows for rows in (training, self.validation) if rows is not None]


def open_data(
    config: TrainConfig,
    world: World,
    mesh: Mesh,
    tokenizer: Tokenizer,
    tokenizer_folder: Path,
    source: BatchSource | None,
) -> TrainingData:
    """Opens a user's `source`, or the files. A collective call.

    A process with limits renders chats with the template in `tokenizer_folder`. Raises ConfigError if nothing can be
    learned from the data.
    """
    if source is not None:
        return _own_batches(config, mesh, source)
    return _file_batches(config, world, mesh, tokenizer, tokenizer_folder)


def _own_batches(config: TrainConfig, mesh: Mesh, source: BatchSource) -> TrainingData:
    """Steps of a user's source. Raises ConfigError without max_steps: a source has no end."""
    if config.max_steps < 0:
        raise ConfigError("a batch source has no end: set max_steps")
    for name, value in {"method": "sft", "teacher_file": "", "lora_dropout": 0}.items():
        if (given := getattr(config, name)) != value:
            raise ConfigError(f"{name} ({given}) needs train_file, and is not supported with a batch source")
    tokens = config.per_device_train_batch_size * config.max_length
    return TrainingData(OwnBatches(source, mesh.index("dp"), mesh.size("dp"), tokens))


def _file_batches(config: TrainConfig, world: World, mesh: Mesh, tokenizer: Tokenizer, folder: Path) -> TrainingData:
    c = config
    say = log.warning if world.rank == 0 else lambda _: None
    files = find_files(c.train_file, say)
    held_files = find_files(c.validation_file, say) if c.validation_file else []
    for path in sorted({path.resolve() for path in files} & {path.resolve() for path in held_files}):
        say(f"{path} is in train_file and in validation_file: the validation loss is of what was learned")
    cache = _open_cache(c, world, files, tokenizer, folder)
    teacher = _open_teacher(c, world, cache, tokenizer) if c.teacher_file else None
    if world.rank == 0:
        for line in cache.report.lines():
            log.info("train_file: %s", line)
    documents, held = split(cache, held_out_percentage(c), c.seed)
    validated = _open_cache(c, world, held_files, tokenizer, folder) if held_files else cache
    held = np.arange(validated.documents) if held_files else held
    counts = count_truncated(cache, documents, c.max_length)
    for line in describe_truncation(counts, cache, c.max_length, "train_file"):
        say(line)
    if counts.divided and world.rank == 0:
        log.info("%d of %d texts are longer than max_length and are learned in parts", counts.divided, counts.texts)
    rows = rows_of(c, cache, documents, passes=_passes(c, cache, documents), teacher=teacher)
    if isinstance(rows, (PreferenceRows, PromptRows)) and rows.dropped:
        kind = "preferences" if isinstance(rows, PreferenceRows) else "records"
        say(f"train_file: {rows.dropped} {kind} are left out: max_length ({c.max_length}) leaves none of an answer")
    if not rows.count(0):
        raise ConfigError(f"train_file_weights ({', '.join(map(str, c.train_file_weights))}) leave no document")
    batches = FileBatches(
        *(rows, mesh.index("dp"), mesh.size("dp"), c.per_device_train_batch_size, c.gradient_accumulation_steps),
        replicas=full_replicas(mesh),
        dropout_seed=c.seed if c.lora_dropout else None,
        rows_of_step=c.global_batch_size,
    )
    if full_replicas(mesh) > mesh.size("dp") and not c.global_batch_size:
        say(
            f"{mesh.size('dp')} of {full_replicas(mesh)} replicas go on: each computes up to {batches.accumulation} "
            f"batches of a step, not {c.gradient_accumulation_steps}, so a step keeps its {batches.rows_of_step} rows"
        )
    return TrainingData(batches, _validation(c, validated, held, say, teacher), cache.digest)


def rows_of(
    config: TrainConfig,
    cache: TokenCache,
    documents: np.ndarray,
    shuffle: bool = True,
    passes: np.ndarray | None = None,
    teacher: "TeacherFile | None" = None,
) -> Rows:
    """The rows of some documents of a cache, which the method of a training decides."""
    if teacher is not None:
        from ckdist.train.data.teacher_rows import TeacherRows

        return TeacherRows(teacher, cache, documents, config.max_length, config.seed, shuffle, passes)
    if config.method == "grpo":
        return PromptRows(cache, documents, config.max_length, config.seed)
    if config.method == "sft":
        return Rows(cache, documents, config.max_length, config.seed, shuffle, passes)
    if config.method == "reward":
        return RewardRows(cache, documents, config.max_length, config.seed, config.method, shuffle)
    return PreferenceRows(cache, documents, config.max_length, config.seed, config.method, shuffle)


def _open_teacher(config: TrainConfig, world: World, cache: TokenCache, tokenizer: Tokenizer) -> "TeacherFile":
    """Opens the teacher's file. One rank of each host reads all of it while the others wait."""
    from ckdist.train.data.teacher_file import TeacherFile

    teacher = together(world, lambda: TeacherFile(config.teacher_file))
    together(world, lambda: teacher.verify(cache, tokenizer) if world.local_rank == 0 else None)
    return teacher


def _passes(c: TrainConfig, cache: TokenCache, documents: np.ndarray) -> np.ndarray | None:
    """How often an epoch has each of `documents`, from the weight of its entry in train_file; None: once."""
    if not c.train_file_weights:
        return None
    weights: dict[str, float] = {}  # by file
    for entry, weight in zip(c.train_file, c.train_file_weights, strict=True):
        for path in find_source(entry):
            weights.setdefault(str(path.resolve()), weight)
    by_file = np.array([weights[str(Path(file).resolve())] for file in cache.files])
    return by_file[cache.file_numbers()[documents]]


def _validation(
    c: TrainConfig,
    cache: TokenCache,
    held: np.ndarray,
    say: Callable[[str], None],
    teacher: "TeacherFile | None" = None,
) -> Rows | None:
    """The rows of the documents `held`; None if nothing is held out, or nothing of it can be learned."""
    if not len(held):
        if held_out_percentage(c):
            say("there is no validation loss: train_file has one document")
        return None
    name = "validation_file" if c.validation_file else "the held-out part"
    try:
        for line in describe_truncation(count_truncated(cache, held, c.max_length), cache, c.max_length, name):
            say(line)
    except ConfigError as error:
        if c.validation_file:
            raise
        say(f"there is no validation loss: {error}")
        return None
    validation = rows_of(c, cache, held, shuffle=False, teacher=teacher)
    if (rows := validation.count(0)) > EVAL_ROWS:
        say(f"the validation loss is taken on the first {EVAL_ROWS} of {rows} rows of max_length")
    return validation


def held_out_percentage(config: TrainConfig) -> float:
    """Per cent of the training documents that are held out."""
    return 0.0 if config.validation_file or config.method == "grpo" else config.validation_split_percentage


def cached_tokens(
    config: TrainConfig, files: list[Path], tokenizer: Tokenizer, chats: ChatProcess, progress: bool
) -> TokenCache:
    """The tokens of `files`, in the cache of a training. Raises as `open_cache`."""
    directory = Path(config.cache_dir or Path(config.output_dir) / "cache")
    kind = KINDS.get(config.method, "")
    reading = config.text_column, config.bad_lines, chats.write
    return open_cache(directory, files, tokenizer, *reading, progress, kind=kind)


def _open_cache(config: TrainConfig, world: World, files: list[Path], tokenizer: Tokenizer, folder: Path) -> TokenCache:
    """Opens the token cache. One rank of each host makes it while the others wait."""
    chats = ChatProcess(folder)
    load = lambda: cached_tokens(config, files, tokenizer, chats, world.rank == 0)
    with contextlib.closing(chats):
        cache = load() if world.local_rank == 0 else None
    world.gather(None)
    cache = cache or load()
    agree(world, "training text", cache.digest)
    return cache


def check_validation(config: TrainConfig, validation: Rows | None) -> None:
    """Raises ConfigError for settings that need validation data, if there is none."""
    for name in ("early_stopping", "samples"):
        number = getattr(config, name)
        if number and validation is None:
            raise ConfigError(f"{name} ({number}) needs validation data: set validation_file")
