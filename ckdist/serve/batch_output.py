"""The output of a batch: a file of answers and one of errors. Lines are only appended.

A line is written whole and once. After a stop, an incomplete last line is cut off, and the custom_ids in both files are
those that are done.
"""

import json
import os
import secrets
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

from ckdist.errors import ConfigError
from ckdist.regular_file import open_regular
from ckdist.serve.encoding import to_json

SYNC_SECONDS = 1.0  # between two calls of fsync


class BatchOutput:
    """Both files, open for appending. Several threads may add results."""

    def __init__(self, answers: Path, errors: Path):
        """Raises ConfigError if a file is none that a batch has written, or OSError if it cannot be opened."""
        self.done: dict[str, bool] = {}  # custom_id -> whether it is in the file of answers
        self.last_rows = 0  # end of the rows of log-probabilities that whole lines name
        self._lock, self._synced_at = threading.Lock(), time.monotonic()
        self._files: list[BinaryIO] = []
        for path in (answers, errors):
            self._read(path, path is answers)
        for path in (answers, errors):
            self._files.append(open(path, "ab", buffering=0))  # noqa: SIM115 - closed by `close`

    def add(self, custom_id: str, status: int, request_id: str, body: Any, error: dict[str, Any] | None = None) -> None:
        """Appends a result: to the answers if `status` is 200, else to the errors. Raises OSError, as if it is full."""
        response = {"status_code": status, "request_id": request_id, "body": body} if status else None
        made = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id}
        data = to_json({**made, "response": response, "error": error}) + b"\n"
        with self._lock:
            file = self._files[0 if status == 200 else 1]
            end = os.lseek(file.fileno(), 0, os.SEEK_END)
            try:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
            except OSError:
                os.ftruncate(file.fileno(), end)
                raise
            self.done[custom_id] = status == 200
            if time.monotonic() - self._synced_at >= SYNC_SECONDS:
                self._sync()

    def _sync(self) -> None:
        for file in self._files:
            os.fsync(file.fileno())
        self._synced_at = time.monotonic()

    def _read(self, path: Path, is_answers: bool) -> None:
        """Reads the custom_ids in a file, and cuts off an incomplete last line."""
        if not path.exists():
            return
        end = number = 0
        with open_regular(path) as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                number += 1
                try:
                    found = json.loads(line)
                    custom_id = found["custom_id"]
                    rows = ((found["response"] or {}).get("body") or {}).get("logprob_rows") or [0, 0]
                    self.last_rows = max(self.last_rows, sum(map(int, rows)))
                except (ValueError, LookupError, TypeError, AttributeError):
                    message = f"{path}, line {number}, is no result of a batch: choose another file, or remove it"
                    raise ConfigError(message) from None
                if not isinstance(custom_id, str) or custom_id in self.done:
                    raise ConfigError(f"{path}, line {number}: {str(custom_id)[:64]!r} is there twice: remove one line")
                self.done[custom_id] = is_answers
                end += len(line)
        if end < path.stat().st_size:
            os.truncate(path, end)

    def close(self) -> None:
        """Syncs and closes the files."""
        with self._lock:
            if self._files:
                self._sync()
            for file in self._files:
                file.close()
            self._files = []

    def __enter__(self) -> "BatchOutput":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
