"""Where fetched models are kept: `NAME.gguf` in one folder of the user's, with `NAME.json` that says what was verified.

A file is verified against its SHA-256 when it comes, and again when it has changed; else its size and time alone are
compared. So a file may also be put there by hand, on a machine without a network.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

from ckdist.comm.thresholds import cache_folder
from ckdist.errors import ConfigError, FetchError
from ckdist.hub.catalogue import NamedModel
from ckdist.hub.lock import file_lock
from ckdist.regular_file import open_regular

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "CKDIST_MODELS"
CHUNK = 1 << 20


def store_folder() -> pathlib.Path:
    """CKDIST_MODELS, or `models` in the user's cache. ConfigError where there is neither."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return pathlib.Path(chosen).expanduser()
    try:
        return cache_folder() / "models"
    except RuntimeError:
        raise ConfigError(
            f"this user has no home folder to keep models in: set {FOLDER_VARIABLE} to a folder"
        ) from None


class Store:
    """The models that are kept in `folder`."""

    def __init__(self, folder: pathlib.Path | None = None):
        self.folder = folder or store_folder()

    def path(self, model: NamedModel) -> pathlib.Path:
        """Where the model is, or would be."""
        return self.folder / f"{model.name}.gguf"

    def has(self, model: NamedModel) -> bool:
        """Is the model here, and what it should be? Reads the file where that is not on record."""
        path = self.path(model)
        try:
            now = path.stat()
        except OSError:
            return False
        if now.st_size != model.bytes:
            return False
        if self._recorded(model) == (model.sha256, now.st_size, now.st_mtime_ns):
            return True
        try:
            found = sha256_of(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        if found == model.sha256:
            with contextlib.suppress(OSError):  # a store that cannot be written is read every time
                self._record(model)
        return found == model.sha256

    def keep(self, model: NamedModel, file: pathlib.Path, sha256: str) -> None:
        """Moves a complete file in. FetchError when it is not what it should be; OSError where it cannot be moved."""
        size = file.stat().st_size
        if (size, sha256) != (model.bytes, model.sha256):
            wrong = (
                f"has {size} bytes and not {model.bytes}"
                if size != model.bytes
                else f"has SHA-256 {sha256[:16]}… and not {model.sha256[:16]}…"
            )
            raise FetchError(
                f"{model.name} came damaged or is another file: it {wrong}; nothing was kept; "
                "try again, or from another index (PIP_INDEX_URL)"
            )
        with open(file, "rb") as done:
            os.fsync(done.fileno())
        file.replace(self.path(model))
        self._record(model)

    @contextlib.contextmanager
    def workspace(self, model: NamedModel) -> Iterator[pathlib.Path]:
        """An empty folder beside the model for what is under way, for one process at a time; it goes at the end.

        FetchError where the folder cannot be written, is full, or another process holds it for too long.
        """
        partial = self.folder / f"{model.name}.partial"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with file_lock(
                self.folder / f"{model.name}.lock", f"another process is fetching {model.name}: waiting for it"
            ):
                shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
                partial.mkdir()
                try:
                    yield partial
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
        except OSError as error:
            raise FetchError(disk_problem(self.folder, error)) from None

    def _recorded(self, model: NamedModel) -> tuple[Any, ...] | None:
        try:
            record = json.loads((self.folder / f"{model.name}.json").read_text())
            return record["sha256"], record["bytes"], record["mtime_ns"]
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _record(self, model: NamedModel) -> None:
        now = self.path(model).stat()
        temporary = self.folder / f"{model.name}.json.{os.getpid()}"
        try:
            temporary.write_text(
                json.dumps({"sha256": model.sha256, "bytes": now.st_size, "mtime_ns": now.st_mtime_ns}) + "\n"
            )
            temporary.replace(self.folder / f"{model.name}.json")
        finally:
            temporary.unlink(missing_ok=True)


def sha256_of(path: pathlib.Path) -> str:
    """The hex SHA-256 of a file's bytes. OSError where it cannot be read."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


def disk_problem(folder: pathlib.Path, error: OSError, variable: str = FOLDER_VARIABLE) -> str:
    """The line for a folder of models that cannot be written; `variable` names another one."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"make room, or set {variable} to a folder on another disk"
        return f"the disk of {folder} is full{_free(folder)}: {remedy}; nothing was kept"
    return f"{folder} cannot be written ({error.strerror or error}): set {variable} to a folder that can"


def _free(folder: pathlib.Path) -> str:
    try:
        return f", {shutil.disk_usage(folder).free / 1e6:.0f} MB are free"
    except OSError:
        return ""
