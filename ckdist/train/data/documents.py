"""Texts and chats from text files, JSON lines and Parquet, one at a time, each with the place it came from.

It knows no tokenizer.
"""

import glob
import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ckdist.errors import ConfigError
from ckdist.regular_file import open_regular

PIECE_CHARACTERS = 1 << 16  # a longer text file is read in pieces that end at a line's end
MAX_LINE_BYTES = 64 << 20
LIBRARY = "{stdlib}"


@dataclass(frozen=True)
class Document:
    """A text, or a chat's messages. `begins` and `ends`: this is the first, the last piece of its text."""

    where: str  # file:line
    text: str = ""
    messages: list[Any] | None = None
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be used, and why not."""

    where: str
    why: str


def find_files(patterns: Iterable[str]) -> list[Path]:
    """The files that names and patterns stand for, each once, in order; ConfigError for a pattern that finds none."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        written = pattern.replace(LIBRARY, glob.escape(sysconfig.get_paths()["stdlib"]))
        matches = [
            Path(name)
            # Path.glob takes no pattern that begins at the root.
            for name in sorted(glob.glob(str(Path(written).expanduser()), recursive=True))  # noqa: PTH207
            if Path(name).is_file()
        ]
        if not matches:
            raise ConfigError(
                f"train_file or validation_file {pattern!r} finds no file here ({Path.cwd()}); "
                "give names or patterns as data/*.txt"
            )
        found.update(dict.fromkeys(matches))
    return list(found)


def read_documents(path: Path, text_column: str) -> Iterator[Document | BadLine]:
    """What is in one file, by its ending. ConfigError for a file that cannot be read at all."""
    try:
        if path.suffix == ".jsonl":
            yield from _json_lines(path, text_column)
        elif path.suffix == ".parquet":
            yield from _parquet(path, text_column)
        else:
            yield from _text(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None


def _text(path: Path) -> Iterator[Document | BadLine]:
    """A text file, in pieces."""
    piece, size, first, begins = [], 0, 1, True
    with open_regular(path) as file:
        for number, raw in enumerate(_lines(file), 1):
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                yield BadLine(f"{path}:{number}", f"byte {error.start} is not UTF-8")
                continue
            if size and size + len(line) > PIECE_CHARACTERS:
                yield Document(f"{path}:{first}", "".join(piece), begins=begins, ends=False)
                piece, size, first, begins = [], 0, number, False
            piece.append(line)
            size += len(line)
    if size:
        yield Document(f"{path}:{first}", "".join(piece), begins=begins)


def _json_lines(path: Path, text_column: str) -> Iterator[Document | BadLine]:
    """A file of JSON objects, one a line."""
    with open_regular(path) as file:
        for number, raw in enumerate(_lines(file), 1):
            if not raw.strip():
                continue
            try:
                record = json.loads(raw)
            except (ValueError, RecursionError) as error:
                yield BadLine(f"{path}:{number}", f"is not JSON: {str(error)[:100]}")
                continue
            yield _record(record, f"{path}:{number}", text_column)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines, of which an endless one is cut."""
    while line := file.readline(MAX_LINE_BYTES):
        yield line


def _parquet(path: Path, text_column: str) -> Iterator[Document | BadLine]:
    """A Parquet file, row by row; ConfigError without pyarrow, or where it cannot be read."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"{path} needs pyarrow: pip install 'ckdist[train]'") from None
    try:
        file = parquet.ParquetFile(path)
        wanted = [name for name in (text_column, "messages") if name in file.schema_arrow.names]
        if not wanted:
            raise ConfigError(
                f"{path} has no column {text_column!r} or 'messages'; it has {', '.join(file.schema_arrow.names)[:200]}"
            )
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=wanted):
            for record in batch.to_pylist():
                number += 1
                yield _record({k: v for k, v in record.items() if v is not None}, f"{path}:{number}", text_column)
    except pa.ArrowException as error:
        raise ConfigError(f"{path} is not Parquet that can be read: {' '.join(str(error).split())[:200]}") from None


def _record(record: object, where: str, text_column: str) -> Document | BadLine:
    """One JSON object or row: `messages` go before the text."""
    if not isinstance(record, dict):
        return BadLine(where, f"is a {type(record).__name__}, not an object")
    messages = record.get("messages")
    if messages is not None:
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            return BadLine(where, "has messages that are not a list of objects")
        if not any(m.get("role") == "assistant" for m in messages):
            return BadLine(where, "has messages without an assistant's turn, on which the loss would be")
        return Document(where, messages=messages)
    text = record.get(text_column)
    if not isinstance(text, str):
        return BadLine(
            where,
            f"has no text in {text_column!r}"
            if text is None
            else f"has a {type(text).__name__} in {text_column!r}, not a text",
        )
    if any("\ud800" <= character <= "\udfff" for character in text):
        return BadLine(where, "has a text that is not Unicode (half of a surrogate pair)")
    return Document(where, text) if text else BadLine(where, f"has an empty text in {text_column!r}")
