"""Reads texts and chats from text files, JSON, CSV and Parquet, one at a time, each with its file and line."""

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ckdist.errors import ConfigError, one_line
from ckdist.regular_file import open_regular
from ckdist.train.data.data_files import LINES
from ckdist.train.data.record_forms import form_of, preference_keys
from ckdist.train.data.records import NOT_READ, BadLine, Document, columns_of, no_text, read_record

PIECE_CHARACTERS = 1 << 16  # a longer text file is read in pieces of whole lines
MAX_LINE_BYTES = 64 << 20
MAX_JSON_BYTES = 1 << 30
NEWLINE = "\n"
# Structured data, archives and documents: their bytes are not a text to learn.
NOT_TEXT = re.compile(
    r"\.(7z|arrow|avro|bz2|db|docx|epub|feather|gguf|gif|gz|h5|hdf5|ipc|jpe?g|lz4|mp[34]|msgpack|np[yz]|odt|orc|"
    r"pdf|pickle|pkl|png|pptx|pq|pth?|rar|rtf|safetensors|sqlite3?|tar|tfrecord|tgz|wav|xlsx?|xz|zip|zst)"
)
DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_COLUMNS = ("messages", "conversations", "conversation", "tools", "history")  # cells that hold JSON
BINARY_BYTES = 8000  # a file with a 0 among these first bytes is not a text, as in git


def read_documents(path: Path, text_column: str) -> Iterator[Document | BadLine]:
    """The documents of one file; its ending selects the format. Raises ConfigError if the file cannot be read
    at all.
    """
    kind = path.suffix.lower()
    try:
        if kind in LINES:
            yield from _json_lines(path, text_column)
        elif kind == ".json":
            yield from _json(path, text_column)
        elif kind == ".parquet":
            yield from _parquet(path, text_column)
        elif kind in DELIMITERS:
            yield from _csv(path, text_column, DELIMITERS[kind])
        elif NOT_TEXT.fullmatch(kind):
            raise ConfigError(f"{path} is no text, and {kind} is not read: give .jsonl, .json, .csv, .parquet or text")
        else:
            yield from _text(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None


def _text(path: Path) -> Iterator[Document | BadLine]:
    piece, size, first, begins = [], 0, 1, True
    with open_regular(path) as file:
        if b"\0" in file.read(BINARY_BYTES):
            raise ConfigError(f"{path} is no text: it has a byte 0; leave the file out")
        file.seek(0)
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
    with open_regular(path) as file:
        for number, raw in enumerate(_lines(file), 1):
            if not raw.strip():
                continue
            try:
                record = json.loads(raw)
            except (ValueError, RecursionError) as error:
                yield BadLine(f"{path}:{number}", f"is not JSON: {str(error)[:100]}")
                continue
            yield read_record(record, f"{path}:{number}", text_column)


def _json(path: Path, text_column: str) -> Iterator[Document | BadLine]:
    """Reads a list of records, an object that has one such list, one record, or one record per line.

    Raises ConfigError if a list breaks off: the start of the next record cannot be found.
    """
    with open_regular(path) as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise ConfigError(f"{path} has more than {MAX_JSON_BYTES} bytes: write it as .jsonl, one record a line")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start}") from None
    begin = _skip_space(text, 0)
    if not text.startswith("[", begin):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            yield from _json_lines(path, text_column)
        else:
            key = _list_key(record, text_column)
            if key is None:
                yield read_record(record, f"{path}:{text.count(NEWLINE, 0, begin) + 1}", text_column)
            else:
                yield from _json_list(text, _list_begin(text, begin, key), path, text_column, False)
        return
    yield from _json_list(text, begin + 1, path, text_column)


def _list_key(record: Any, text_column: str) -> str | None:
    """The key of the one list of objects in an object that is no record itself, such as {"data": [...]}."""
    if not isinstance(record, dict) or text_column in record or form_of(record) or preference_keys(record):
        return None
    keys = [
        key
        for key, value in record.items()
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    ]
    return keys[0] if len(keys) == 1 else None


def _list_begin(text: str, at: int, key: str) -> int:
    """The position after the bracket that begins the list of `key` in the object that begins at `at`."""
    decode = json.JSONDecoder().raw_decode
    at = _skip_space(text, at + 1)
    while True:
        name, at = decode(text, at)
        at = _skip_space(text, _skip_space(text, at) + 1)  # the colon
        if name == key:
            return at + 1
        at = _skip_space(text, decode(text, at)[1])
        at = _skip_space(text, at + 1)  # the comma


def _skip_space(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\r", "\n"):
        at += 1
    return at


def _json_list(text: str, at: int, path: Path, text_column: str, is_whole: bool = True) -> Iterator[Document | BadLine]:
    """The records of the list that begins before `at`. `is_whole`: nothing may follow it."""
    decode, line, counted = json.JSONDecoder().raw_decode, 1, 0
    at = _skip_space(text, at)
    ended = text.startswith("]", at)
    while not ended:
        line, counted = line + text.count(NEWLINE, counted, at), at
        try:
            record, at = decode(text, at)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{line} is not JSON: {str(error)[:100]}") from None
        yield read_record(record, f"{path}:{line}", text_column)
        at = _skip_space(text, at)
        ended = text.startswith("]", at)
        if not ended and not text.startswith(",", at):
            line += text.count(NEWLINE, counted, at)
            raise ConfigError(f"{path}:{line} has {text[at : at + 20]!r} where a comma or the end of the list belongs")
        at = at if ended else _skip_space(text, at + 1)
    if is_whole and (rest := text[at + 1 :].strip()):
        raise ConfigError(f"{path} has {rest[:20]!r} after its list: write one list")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields lines. A line longer than MAX_LINE_BYTES is split."""
    while line := file.readline(MAX_LINE_BYTES):
        yield line


def _parquet(path: Path, text_column: str) -> Iterator[Document | BadLine]:
    """Reads a Parquet file row by row. Raises ConfigError without pyarrow, or if the file cannot be read."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"{path} needs pyarrow: pip install 'ckdist[train]'") from None
    try:
        file = parquet.ParquetFile(path)
        number, columns = 0, _columns(path, file.schema_arrow.names, text_column)
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            for record in batch.to_pylist():
                number += 1
                yield read_record(_without_nulls(record), f"{path}:{number}", text_column)
    except pa.ArrowException as error:
        raise ConfigError(f"{path} is not Parquet that can be read: {one_line(error)}") from None


def _columns(path: Path, names: list[str], text_column: str) -> list[str]:
    """The columns of a table that are read. Raises ConfigError if it has no records."""
    if text_column not in names and form_of(names) is None and not preference_keys(names):
        raise ConfigError(f"{path} {no_text(names, text_column)}")
    return columns_of(names, text_column)


def _csv(path: Path, text_column: str, delimiter: str) -> Iterator[Document | BadLine]:
    """Reads a table whose first row has the columns' names. An empty cell is absent."""
    csv.field_size_limit(MAX_LINE_BYTES)
    line = 0
    with open_regular(path) as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as file:
        try:
            rows = csv.reader(file, delimiter=delimiter, strict=True)
            names = next(rows, [])
            if len(set(names)) < len(names):
                raise ConfigError(f"{path} has two columns of one name: its first row must name the columns")
            kept = set(_columns(path, names, text_column))
            line = rows.line_num
            for row in rows:
                where, line = f"{path}:{line + 1}", rows.line_num
                if row and len(row) != len(names):
                    yield BadLine(where, f"has {len(row)} cells, and the first row has {len(names)}")
                elif row:
                    cells = zip(names, row, strict=True)
                    yield _row({name: cell for name, cell in cells if name in kept and cell}, where, text_column)
        except csv.Error as error:
            raise ConfigError(f"{path}:{line + 1} is not CSV: {error}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 at byte {error.start} of a block: save it as UTF-8") from None


def _row(record: dict[str, Any], where: str, text_column: str) -> Document | BadLine:
    """Reads one row of a CSV file, whose lists are JSON."""
    for name in (*JSON_COLUMNS, *NOT_READ):
        if name in record and name != text_column:
            try:
                record[name] = json.loads(record[name])
            except (ValueError, RecursionError):
                return BadLine(where, f"has a cell in {name!r} that is not JSON")
    return read_record(record, where, text_column)


def _without_nulls(value: Any) -> Any:
    """Removes nulls: a row of a table has null for every field that only other rows have."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
