"""The store of fetched models: `NAME.gguf` in one folder of the user, with `NAME.json` that records its verification.

A file is verified against its SHA-256 when it arrives, and again when its size or time has changed. So a file may also
be copied there by hand, on a machine without a network.
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
from ckdist.regular_file import open_regular, replace_text, sync

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "CKDIST_MODELS"
CHUNK = 1 << 20


def store_folder() -> pathlib.Path:
    """Returns CKDIST_MODELS, or `models` in the user's cache. Raises ConfigError if there is neither."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return pathlib.Path(chosen).expanduser()
    try:
        return cache_folder() / "models"
    except RuntimeError:
        raise ConfigError(
            f"this user has no home folder to keep models in: set {FOLDER_VARIABLE} to a folder"
        ) from None


class Store:
    """The models in `store_folder()`."""

    def __init__(self) -> None:
        self.folder = store_folder()

    def path(self, model: NamedModel) -> pathlib.Path:
        """Returns the path of the model's file, which need not exist."""
        return self.folder / f"{model.name}.gguf"

    def has(self, model: NamedModel) -> bool:
        """True if the model's file exists and is valid. Reads the file if its verification is not on record."""
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
            with contextlib.suppress(OSError):  # a read-only store is verified every time
                self._record(model)
        return found == model.sha256

    def keep(self, model: NamedModel, file: pathlib.Path, sha256: str) -> None:
        """Moves a complete file into the store.

        Raises:
            FetchError: Its size or SHA-256 is wrong.
            OSError: It cannot be moved.
        """
        size = file.stat().st_size
        if (size, sha256) != (model.bytes, model.sha256):
            wrong = (
                f"has {size} bytes and not {model.bytes}"
                if size != model.bytes
                else f"has SHA-256 {sha256[:16]}… and not {model.sha256[:16]}…"
            )
            raise FetchError(
                f"{model.name} is damaged or another file: it {wrong}; nothing was kept; "
                "try again, or from another index (PIP_INDEX_URL)"
            )
        sync(file)
        file.replace(self.path(model))
        self._record(model)

    @contextlib.contextmanager
    def workspace(self, model: NamedModel) -> Iterator[pathlib.Path]:
        """Yields an empty folder for the download of a model, for one process at a time. Removes it afterwards.

        Raises:
            FetchError: The folder cannot be written or is full, or another process holds it for too long.
        """
        partial = self.folder / f"{model.name}.partial"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with file_lock(
                self.folder / f"{model.name}.lock", f"another process is fetching {model.name}: waiting for it"
            ):
                shutil.rmtree(partial, ignore_errors=True)  # left behind by a process that was killed
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
        record = {"sha256": model.sha256, "bytes": now.st_size, "mtime_ns": now.st_mtime_ns}
        replace_text(self.folder / f"{model.name}.json", json.dumps(record) + "\n")


def sha256_of(path: pathlib.Path) -> str:
    """Returns the hex SHA-256 of a file. Raises OSError if it cannot be read."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


def disk_problem(folder: pathlib.Path, error: OSError, variable: str = FOLDER_VARIABLE) -> str:
    """Returns the message for a folder of models that cannot be written. `variable` sets another folder."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"make room, or set {variable} to a folder on another disk"
        return f"the disk of {folder} is full{_free(folder)}: {remedy}; nothing was kept"
    return f"{folder} cannot be written ({error.strerror or error}): set {variable} to a writable folder"


def _free(folder: pathlib.Path) -> str:
    try:
        return f", {shutil.disk_usage(folder).free / 1e6:.0f} MB are free"
    except OSError:
        return ""
