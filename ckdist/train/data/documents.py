"""Reads texts and chats from text files, JSON lines and Parquet, one at a time, each with its file and line."""

import glob
import json
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ckdist.errors import ConfigError, one_line
from ckdist.regular_file import open_regular
from ckdist.train.data.records import BadLine, Document, columns_of, no_text, read_record

PIECE_CHARACTERS = 1 << 16  # a longer text file is read in pieces of whole lines
MAX_LINE_BYTES = 64 << 20
MAX_JSON_BYTES = 1 << 30
LIBRARY = "{stdlib}"
NEWLINE = "\n"
LINES = (".jsonl", ".ndjson", ".jsonlines")
# Structured data, archives and documents: their bytes are not a text to learn.
NOT_TEXT = re.compile(
    r"\.(7z|arrow|avro|bz2|csv|db|docx|epub|feather|gguf|gif|gz|h5|hdf5|ipc|jpe?g|lz4|mp[34]|msgpack|np[yz]|odt|orc|"
    r"pdf|pickle|pkl|png|pptx|pq|pth?|rar|rtf|safetensors|sqlite3?|tar|tfrecord|tgz|tsv|wav|xlsx?|xz|zip|zst)"
)
BINARY_BYTES = 8000  # a file with a 0 among these first bytes is not a text, as in git


def find_files(patterns: Iterable[str], warn: Callable[[str], None] = lambda _: None) -> list[Path]:
    """Returns the files that names and patterns match, each once, in order.

    `warn` is called with a message for a file that two of them match. Raises ConfigError if one of them matches no
    file.
    """
    found: dict[Path, Path] = {}  # by resolved path
    for pattern in patterns:
        written = pattern.replace(LIBRARY, glob.escape(sysconfig.get_paths()["stdlib"]))
        path = Path(written).expanduser()
        # Path.glob takes no pattern that begins at the root.
        names = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
        matches = [Path(name) for name in names if Path(name).is_file()]
        if not matches:
            raise ConfigError(
                f"train_file or validation_file {pattern!r} finds no file here ({Path.cwd()}); "
                + (
                    f"it is a folder: write {pattern}/*.jsonl"
                    if path.is_dir()
                    else "give names or patterns as data/*.txt"
                )
            )
        for match in matches:
            if (first := found.setdefault(match.resolve(), match)) is not match:
                warn(f"{match} is named twice{'' if first == match else f' (as {first} too)'}, and is read once")
    return list(found.values())


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
        elif NOT_TEXT.fullmatch(kind):
            raise ConfigError(f"{path} is no text, and {kind} is not read: give .jsonl, .json, .parquet or text")
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
    """Reads a list of records, one record, or one record per line.

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
            yield read_record(record, f"{path}:{text.count(NEWLINE, 0, begin) + 1}", text_column)
        return
    yield from _json_list(text, begin + 1, path, text_column)


def _skip_space(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\r", "\n"):
        at += 1
    return at


def _json_list(text: str, at: int, path: Path, text_column: str) -> Iterator[Document | BadLine]:
    """The records of the list that begins before `at`."""
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
    if rest := text[at + 1 :].strip():
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
        names = file.schema_arrow.names
        if not {text_column, "messages"} & set(names):
            raise ConfigError(f"{path} {no_text(names, text_column)}")
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=columns_of(names, text_column)):
            for record in batch.to_pylist():
                number += 1
                yield read_record(_without_nulls(record), f"{path}:{number}", text_column)
    except pa.ArrowException as error:
        raise ConfigError(f"{path} is not Parquet that can be read: {one_line(error)}") from None


def _without_nulls(value: Any) -> Any:
    """Removes nulls: a row of a table has null for every field that only other rows have."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
