"""Log-probabilities of a batch in a binary file: one row of fixed size for each token.

A result names its rows: `"logprob_rows": [first, count]`. Reading: `np.memmap(path, dtype=row_type(k))`.
"""

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np

from ckdist.errors import EngineError

TOKEN = re.compile(r"token_id:(\d{1,9})")


def row_type(k: int) -> np.dtype[Any]:
    """Returns the type of a row: the token and its log-probability, and the k most likely ones. -1: there is none."""
    return np.dtype([("token", "<i4"), ("logprob", "<f4"), ("top_tokens", "<i4", (k,)), ("top_logprobs", "<f4", (k,))])


class LogprobRows:
    """The file, open for appending. Several threads may add rows."""

    def __init__(self, path: Path, k: int, rows: int):
        """Keeps the first `rows` rows of the file, those of results that are complete."""
        self.k, self._type = k, row_type(k)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by `close`
        self._lock = threading.Lock()
        self._rows = rows
        self._file.truncate(rows * self._type.itemsize)

    def take(self, body: dict[str, Any]) -> None:
        """Moves the log-probabilities of an answer's choices from its JSON to rows."""
        for choice in body.get("choices") or ():
            entries = _entries(choice.pop("logprobs", None) or {})
            rows = np.zeros(len(entries), self._type)
            rows["top_tokens"], rows["top_logprobs"] = -1, -np.inf
            for row, (token, logprob, top) in zip(rows, entries, strict=True):
                row["token"], row["logprob"] = token, logprob
                best = sorted(top.items(), key=lambda item: -item[1])[: self.k]
                row["top_tokens"][: len(best)] = [token for token, _ in best]
                row["top_logprobs"][: len(best)] = [logprob for _, logprob in best]
            with self._lock:
                first, self._rows = self._rows, self._rows + len(rows)
                self._file.write(rows.tobytes())
            choice["logprob_rows"] = [first, len(rows)]
        spans = [choice["logprob_rows"] for choice in body.get("choices") or ()]
        if spans:
            body["logprob_rows"] = [0, max(first + count for first, count in spans)]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _entries(found: dict[str, Any]) -> list[tuple[int, float, dict[int, float]]]:
    """Returns (token, log-probability, the most likely ones) of each token of a chat or of a completion."""
    if "content" in found:
        items = found["content"] or ()
        top = [{_id(one["token"]): one["logprob"] for one in item["top_logprobs"]} for item in items]
        pairs = [(_id(item["token"]), item["logprob"]) for item in items]
    else:
        pairs = [
            (_id(token), -np.inf if logprob is None else logprob)
            for token, logprob in zip(found.get("tokens") or (), found.get("token_logprobs") or (), strict=True)
        ]
        top = [{_id(token): value for token, value in (one or {}).items()} for one in found.get("top_logprobs") or ()]
    return [(token, logprob, best) for (token, logprob), best in zip(pairs, top, strict=True)]


def _id(text: str) -> int:
    match = TOKEN.fullmatch(text)
    if match is None:
        raise EngineError(f"the server has answered {text[:32]!r} in place of a token's id")
    return int(match[1])
