"""Checkpoints of a training: a model, with float32 weights and optimizer state, and JSON; never pickle.

A checkpoint is written under a temporary name. Its files, their checksums, the folder and the folder's name are synced
in that order. So a folder with a checkpoint's name is always complete. The contents do not depend on the number of
ranks.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ckdist.errors import ConfigError, EngineError, ModelFileError
from ckdist.hub.store import sha256_of
from ckdist.regular_file import sync, write_synced
from ckdist.train.checkpoint_parts import PARTS
from ckdist.weights.json_file import read_json_object

STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d{1,15})")
_TEMPORARY = ".checkpoint-"


@dataclass(frozen=True)
class TrainState:
    """The progress of a training.

    Random draws depend only on the seed and the position in the data, so these are the whole random state.
    """

    step: int = 0
    updates: int = 0  # steps that changed the weights
    skipped_steps: int = 0
    tokens: int = 0  # with a target, in all steps so far
    epoch: int = 0
    row: int = 0
    seed: int = 0
    data: str = ""  # digest of the tokens
    rows_of_step: int = 0
    steps: int = 0  # planned in all
    planned: str = ""  # the settings that `steps` was computed from
    best_step: int = 0  # of the smallest validation loss, with early_stopping; 0: there is none
    best_loss: float = 0.0
    not_better: int = 0  # validation losses since then
    loss_mean: float = 0.0  # running means, for guards
    norm_mean: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)  # the configuration


class Folder:
    """The checkpoints of one training, on rank 0 only. A lock excludes a second training until `close`.

    Creates `output_dir`. Raises ConfigError if it cannot be created or is locked.
    """

    def __init__(self, output_dir: Path) -> None:
        self.path, self._tag = output_dir, secrets.token_hex(8)
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(output_dir, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another training writes to {output_dir}: wait for its end, or set another output_dir"
            ) from None
        except OSError as error:
            raise ConfigError(f"cannot use output_dir {output_dir}: {error.strerror}") from None
        for left in output_dir.glob(f"{_TEMPORARY}*"):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)

    def close(self) -> None:
        """Releases the lock."""
        os.close(self._lock)

    def steps(self) -> list[int]:
        """The steps of the existing checkpoints, ascending."""
        found = (_NAME.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def at(self, step: int) -> Path:
        """The folder of the checkpoint after `step` steps."""
        return self.path / f"checkpoint-{step}"

    def temporary(self, name: str | int) -> Path:
        """The folder of a checkpoint that is being written. A restart removes it."""
        return self.path / f"{_TEMPORARY}{name}.{self._tag}"

    def choose(self, resume: str) -> Path | None:
        """Returns the verified checkpoint to resume from, or None to start from the beginning.

        Args:
            resume: auto, never, or a checkpoint's folder.

        Raises:
            ConfigError: `resume` is never, and there is a checkpoint.
            ModelFileError: The checkpoint is corrupt. The error names it and the one before it.
        """
        if resume == "never":
            if found := self.steps():
                raise ConfigError(
                    f"resume is never, and {self.path} has {self.at(found[-1]).name} of an earlier training: "
                    "remove it, or set another output_dir"
                )
            return None
        if resume != "auto":
            verify(Path(resume))
            return Path(resume)
        found = self.steps()
        if not found:
            return None
        try:
            verify(self.at(found[-1]))
        except ModelFileError as error:
            before = (
                f"go on from the one before it with --set resume={self.at(found[-2])}"
                if len(found) > 1
                else "there is none before it: remove it to start from the beginning"
            )
            raise ModelFileError(f"{error}; {before}") from None
        return self.at(found[-1])

    def begin(self, step: int) -> Path:
        """Makes the folder of a checkpoint that is being written. Raises EngineError as `finish`."""
        try:
            self.temporary(step).mkdir()
            (self.temporary(step) / PARTS).mkdir()
        except OSError as error:
            raise self.failed(step, disk_reason(error)) from None
        return self.temporary(step).absolute()

    def failed(self, step: int, reason: str) -> EngineError:
        """Removes the folder of `begin`, and returns the error that names the last good checkpoint."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)
        found = self.steps()
        last = f"the last good one is {self.at(found[-1])}" if found else "there is none before it"
        return EngineError(
            f"{self.at(step)} could not be written: {reason}; {last}: make room and start again to go on from there"
        )

    def finish(self, state: TrainState, checksums: dict[str, str], keep: int) -> None:
        """Names the checkpoint of `state` that `begin` has begun, then removes all but the last `keep` (0: none).

        `checksums` are those of its files, which are synced. Raises EngineError if the disk is full or the folder
        cannot be written.
        """
        target, temporary = self.at(state.step), self.temporary(state.step)
        try:
            write_synced(temporary / STATE, json.dumps({**asdict(state), "sha256": checksums}, indent=2).encode())
            sync(temporary / PARTS)
            sync(temporary)
            if target.exists():  # a run that resumed from an earlier step reaches this one again
                self._remove(target)
            temporary.rename(target)
            sync(self.path)
        except OSError as error:
            raise self.failed(state.step, disk_reason(error)) from None
        if keep:
            for step in [step for step in self.steps() if step != state.step][: max(0, len(self.steps()) - keep)]:
                self._remove(self.at(step))

    def _remove(self, checkpoint: Path) -> None:
        # It loses its name first, so that a half removed one is never taken for complete.
        doomed = self.temporary(f"removed.{checkpoint.name}")
        checkpoint.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def disk_reason(error: OSError) -> str:
    """The reason why a file could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full"
    return "files may not be so large" if error.errno == errno.EFBIG else error.strerror or str(error)


def verify(checkpoint: Path) -> TrainState:
    """Compares the files of a checkpoint with their checksums, and returns its state.

    Raises ModelFileError. Its text begins with the checkpoint's name.
    """
    if not (checkpoint / STATE).is_file():
        raise ModelFileError(f"{checkpoint} is not a checkpoint: it has no {STATE}")
    values = read_json_object(checkpoint / STATE)
    checksums = values.pop("sha256", None)
    parts = f"{PARTS}/"
    if not isinstance(checksums, dict) or not any(str(name).startswith(parts) for name in checksums):
        raise ModelFileError(f"{checkpoint} is corrupt, or of an earlier version: {STATE} has no checksums of {parts}")
    for name, expected in checksums.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ModelFileError(f"{checkpoint} is corrupt: {STATE} names {name!r:.80}")
        try:
            found = sha256_of(checkpoint / name)
        except OSError as error:
            raise ModelFileError(f"{checkpoint} is corrupt: {name} cannot be read ({error.strerror})") from None
        if found != expected:
            raise ModelFileError(
                f"{checkpoint} is corrupt: the SHA-256 of {name} begins with {found[:12]}, "
                f"and must with {str(expected)[:12]}"
            )
    known = asdict(TrainState())
    if set(values) != set(known) or not all(type(values[name]) is type(default) for name, default in known.items()):
        raise ModelFileError(
            f"{checkpoint} is of another version: {STATE} has "
            f"{', '.join(sorted(set(values) ^ set(known))) or 'fields of other types'}"
        )
    return TrainState(**values)
