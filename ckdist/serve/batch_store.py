"""Files and batches of clients, as `--batch-dir` keeps them: rows in SQLite, and contents in files.

    DIR/batches.sqlite      a row for each file and each batch
    DIR/files/FILE          contents that a client has uploaded, and results once a batch has ended
    DIR/results/BATCH       answers and errors of a running batch (`batch_output`)

Every row has an owner: the name of the client's key. Others do not see it.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import secrets
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ckdist.errors import ConfigError
from ckdist.serve.problems import Problem

MAX_FILE = 200 << 20  # bytes, as OpenAI's
MAX_LINES = 100_000
ROWS_BYTES = 1 << 20  # of the disk that stay free for rows, so that the end of a batch can be written
MAX_FILES = 1000  # of one owner, beside results; as many batches
OPEN = ("validating", "in_progress", "finalizing", "cancelling")  # a batch that has not ended
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL, bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, face TEXT NOT NULL, status TEXT NOT NULL, created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL, facts TEXT NOT NULL, ended INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS files_of ON files (owner, created_at);
CREATE INDEX IF NOT EXISTS batches_of ON batches (owner, face, created_at);
"""


class BatchStore:
    """The folder. One process uses it, in one thread."""

    def __init__(self, folder: str, most_bytes: int):
        """Raises ConfigError if the folder cannot be used."""
        self.folder, self.most_bytes = pathlib.Path(folder), most_bytes
        try:
            for name in ("", "files", "results"):
                (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = open(self.folder / "lock", "ab")  # noqa: SIM115 - held as long as the process lives
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--batch-dir {folder} is in use by another server: choose another folder") from None
        except OSError as error:
            raise ConfigError(f"--batch-dir {folder} cannot be used: {error.strerror}") from None
        try:
            self._rows = sqlite3.connect(self.folder / "batches.sqlite", isolation_level=None)
            self._rows.row_factory = sqlite3.Row
            self._rows.execute("PRAGMA journal_mode=WAL")
            self._rows.executescript(SCHEMA)
        except sqlite3.Error as error:
            raise ConfigError(f"--batch-dir {folder}: batches.sqlite cannot be read ({error}): move it away") from None

    # files

    def path(self, file_id: str) -> pathlib.Path:
        """Returns the place of a file's contents."""
        return self.folder / "files" / file_id

    def results(self, batch_id: str, kind: str) -> pathlib.Path:
        """Returns the place of a running batch's answers or errors."""
        return self.folder / "results" / f"{batch_id}.{kind}.jsonl"

    def check_room(self, size: int) -> None:
        """Raises Problem 507 if `size` more bytes exceed the folder's limit, or the disk has no room for them."""
        free = shutil.disk_usage(self.folder).free
        if free < size + ROWS_BYTES:
            message = f"the disk of --batch-dir has {free} bytes free, and {size} bytes and their rows need"
            raise Problem(507, f"{message} {size + ROWS_BYTES}; make room on it")
        used = self.used()
        if used + size > self.most_bytes:
            message = f"files and results have {used} bytes of at most {self.most_bytes} (--batch-dir)"
            raise Problem(507, f"{message}, and {size} more do not fit; delete files")

    def used(self) -> int:
        """Returns the bytes of all files and results."""
        folders = (self.folder / "files", self.folder / "results")
        return sum(entry.stat().st_size for folder in folders for entry in os.scandir(folder))

    @contextlib.contextmanager
    def upload(self, owner: str) -> Iterator[pathlib.Path]:
        """Yields a new place for contents. It is removed unless they become a file (`add_file`).

        Raises Problem 400 if the owner has too many files. Results of batches are not refused: they would never end.
        """
        self._check_count("files", owner)
        path = self.path(f".{secrets.token_hex(8)}")
        try:
            yield path
        except OSError as error:
            raise Problem(507, f"the file cannot be written to --batch-dir: {error.strerror}") from None
        finally:
            path.unlink(missing_ok=True)

    def add_file(self, owner: str, path: pathlib.Path, purpose: str, filename: str) -> dict[str, Any]:
        """Makes a file of the contents at `path`. Raises Problem 507 on a full disk."""
        file_id = f"file-{secrets.token_hex(12)}"
        row = (file_id, owner, purpose, filename[:200], path.stat().st_size, int(time.time()))
        self._write("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", row)
        path.rename(self.path(file_id))
        return self.file(owner, file_id)

    def file(self, owner: str, file_id: str) -> dict[str, Any]:
        """Returns a file's facts. Raises Problem 404 if the owner has none of this id."""
        row = self._rows.execute("SELECT * FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone()
        if row is None or not self.path(row["id"]).exists():
            raise Problem(404, f"there is no file {file_id[:64]!r}", "file_id", "not_found")
        return dict(row)

    def files(self, owner: str, purpose: str | None) -> list[dict[str, Any]]:
        """Returns the facts of all files, the newest first."""
        rows = self._rows.execute("SELECT * FROM files WHERE owner = ? ORDER BY created_at DESC, rowid DESC", (owner,))
        return [dict(row) for row in rows if purpose in (None, row["purpose"])]

    def remove_file(self, owner: str, file_id: str) -> None:
        """Removes a file. Raises Problem: 404 if there is none, 409 if a batch reads it."""
        self.file(owner, file_id)
        for batch in self.unfinished():
            if batch["input_file_id"] == file_id:
                raise Problem(409, f"{file_id} is the input of {batch['id']}, which runs; cancel it first")
        self.path(file_id).unlink(missing_ok=True)
        self._write("DELETE FROM files WHERE id = ?", (file_id,))

    # batches

    def add_batch(self, owner: str, face: str, expires_at: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Makes a batch, which waits to be run. Raises Problem 400 if the owner has too many."""
        self._check_count("batches", owner)
        batch_id = f"{'msgbatch_' if face == 'anthropic' else 'batch_'}{secrets.token_hex(12)}"
        row = (batch_id, owner, face, "validating", int(time.time()), expires_at, json.dumps(facts))
        self._write("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, 0)", row)
        return self.batch(owner, face, batch_id)

    def batch(self, owner: str, face: str, batch_id: str) -> dict[str, Any]:
        """Returns a batch. Raises Problem 404 if the owner has none of this id."""
        wanted = "SELECT * FROM batches WHERE id = ? AND owner = ? AND face = ?"
        row = self._rows.execute(wanted, (batch_id, owner, face)).fetchone()
        if row is None:
            raise Problem(404, f"there is no batch {batch_id[:64]!r}", "batch_id", "not_found")
        return _batch(row)

    def batches(self, owner: str, face: str) -> list[dict[str, Any]]:
        """Returns all batches of an owner, the newest first."""
        wanted = "SELECT * FROM batches WHERE owner = ? AND face = ? ORDER BY created_at DESC, rowid DESC"
        return [_batch(row) for row in self._rows.execute(wanted, (owner, face))]

    def unfinished(self) -> list[dict[str, Any]]:
        """Returns the batches of all owners that have not ended, the oldest first."""
        rows = self._rows.execute("SELECT * FROM batches WHERE NOT ended ORDER BY created_at, rowid")
        return [_batch(row) for row in rows]

    def change(self, batch_id: str, status: str | None = None, **facts: Any) -> dict[str, Any]:
        """Changes a batch's status and facts. Returns the batch."""
        row = self._rows.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
        merged = json.dumps({**json.loads(row["facts"]), **facts})
        now = status or row["status"]
        row = (now, merged, now not in OPEN, batch_id)
        self._write("UPDATE batches SET status = ?, facts = ?, ended = ? WHERE id = ?", row)
        return _batch(self._rows.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone())

    def remove_batch(self, owner: str, face: str, batch_id: str) -> None:
        """Removes a batch and its results. Raises Problem: 404 if there is none, 409 if it has not ended."""
        batch = self.batch(owner, face, batch_id)
        if batch["status"] in OPEN:
            raise Problem(409, f"{batch_id} is {batch['status']}; cancel it first")
        for kind in ("answers", "errors"):
            self.results(batch_id, kind).unlink(missing_ok=True)
        for file_id in filter(None, (batch["input_file_id"], batch.get("output_file_id"), batch.get("error_file_id"))):
            if face == "anthropic":
                self.path(file_id).unlink(missing_ok=True)
                self._write("DELETE FROM files WHERE id = ?", (file_id,))
        self._write("DELETE FROM batches WHERE id = ?", (batch_id,))

    def _check_count(self, table: str, owner: str) -> None:
        wanted = f"SELECT COUNT(*) FROM {table} WHERE owner = ?"  # noqa: S608 - `table` is a constant
        count = self._rows.execute(wanted, (owner,)).fetchone()[0]
        if count >= MAX_FILES:
            raise Problem(400, f"there are {count} {table} already, of at most {MAX_FILES}; delete some")

    def _write(self, statement: str, values: tuple[Any, ...]) -> None:
        """Raises Problem 507 if the disk is full."""
        try:
            self._rows.execute(statement, values)
        except sqlite3.OperationalError as error:
            raise Problem(507, f"--batch-dir: batches.sqlite cannot be written ({error})") from None

    def close(self) -> None:
        """Closes the database."""
        self._rows.close()
        self._lock.close()


def _batch(row: sqlite3.Row) -> dict[str, Any]:
    found = dict(row)
    return {**json.loads(found.pop("facts")), **found}
