"""A file of a teacher's most probable tokens at each learned token of a data set, in the order of the token cache.

Bytes: a header of 4096 (JSON, padded), one record per learned token (ids int32 ascending, log-probabilities float32),
and the CRC-32 of all before it. While it is written it is OUT.part, and OUT.part.state has the number of complete
documents and records, and their CRC.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckdist.errors import ConfigError, EngineError
from ckdist.regular_file import open_regular, read_regular, write_synced
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.train.data.token_cache import TokenCache

FORMAT = "ckdist teacher 1"
HEADER_BYTES, CRC_BYTES, READ_BYTES = 4096, 4, 8 << 20
MOST = {"choices": 1024, "entries": 1 << 44}
# Causes of other tokens, in the order in which they are named.
CAUSES = {"tokenizer": "another tokenizer", "template": "another chat template", "data": "other data"}


class Header(NamedTuple):
    """The teacher and the data of a file."""

    teacher: str  # name of the model
    digest: str  # of the model's files
    tokenizer: str  # digest
    template: str  # digest
    data: str  # digest of the tokens
    choices: int
    temperature: float
    context: int
    entries: int

    def encode(self) -> bytes:
        """The bytes at the beginning of the file."""
        text = json.dumps({"format": FORMAT, **self._asdict()})
        return text.encode().ljust(HEADER_BYTES - 1) + b"\n"

    @property
    def dtype(self) -> np.dtype[np.void]:
        """The type of a record."""
        return np.dtype([("ids", "<i4", (self.choices,)), ("logprobs", "<f4", (self.choices,))])

    @property
    def records_end(self) -> int:
        """Bytes of the header and all records."""
        return HEADER_BYTES + self.entries * self.dtype.itemsize


def data_digests(cache: TokenCache, tokenizer: Tokenizer) -> dict[str, str]:
    """The fields of CAUSES."""
    sha = lambda text: hashlib.sha256(text.encode()).hexdigest()[:32]
    return {
        "tokenizer": sha(tokenizer.backend.to_str()),
        "template": sha(json.dumps(dict(tokenizer.templates), sort_keys=True)),
        "data": cache.digest,
    }


def learned_before(cache: TokenCache) -> np.ndarray:
    """int64 (documents + 1,): records before each document. The first token of a document is never learned."""
    if cache.learned is None:
        counts = np.diff(cache.starts) - 1
    else:
        sums = np.add.reduceat(cache.learned, cache.starts[:-1], dtype=np.int64)
        counts = sums - cache.learned[cache.starts[:-1]]
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def read_header(path: str | Path) -> Header:
    """Reads the header of a complete file. Raises ConfigError if it is none, or its size is wrong."""
    try:
        with open_regular(path) as file:
            start, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
        fields: Mapping[str, Any] = json.loads(start)
        if fields["format"] != FORMAT:
            raise ValueError("another format")
        header = Header(**{name: Header.__annotations__[name](fields[name]) for name in Header._fields})
        numbers_fit = all(1 <= getattr(header, name) <= most for name, most in MOST.items())
        if not numbers_fit or not 0 < header.temperature < 1e3 or header.encode() != start:
            raise ValueError("fields out of range")
    except OSError as error:
        raise ConfigError(f"teacher file {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise ConfigError(f"{path} is no teacher file: write one with ckdist distill") from None
    if size != header.records_end + CRC_BYTES:
        raise ConfigError(
            f"{path} has {size} bytes, and its {header.entries} tokens need {header.records_end + CRC_BYTES}: "
            "it is damaged, write it again with ckdist distill"
        )
    return header


class TeacherFile:
    """A complete file, mapped. Raises the errors of `read_header`."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.header = path, read_header(path)
        self.records = np.memmap(path, self.header.dtype, "r", HEADER_BYTES, (self.header.entries,))

    def verify(self, cache: TokenCache, tokenizer: Tokenizer) -> None:
        """Reads the whole file. Raises ConfigError if it is damaged, or not of these tokens."""
        own = data_digests(cache, tokenizer)
        if self.header.data != own["data"]:
            name = next(name for name in CAUSES if getattr(self.header, name) != own[name])
            raise ConfigError(
                f"{self.path} has other tokens, probably of {CAUSES[name]} ({name} "
                f"{getattr(self.header, name):.8}, here {own[name]:.8}): "
                "give the same data, or write it with ckdist distill --tokenizer STUDENT"
            )
        with open_regular(self.path) as file:
            crc, _ = _crc(file, self.header.records_end)
            if int.from_bytes(file.read(CRC_BYTES), "little") != crc:
                raise ConfigError(f"{self.path} is damaged (its checksum differs): write it again with ckdist distill")


def verify_place(path: str | Path) -> None:
    """Raises ConfigError if no file of this name can be written."""
    folder = Path(path).parent
    if Path(path).is_dir():
        raise ConfigError(f"cannot write -o {path}: it is a folder")
    if not folder.is_dir():
        raise ConfigError(f"cannot write -o {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write -o {path}: the folder {folder} is read-only")


class TeacherWriter:
    """Writes a file, and continues one that was stopped.

    Raises ConfigError if there is another file under these names, EngineError if it cannot be written.

    Attributes:
        documents: Documents whose records are all written.
        entries: Written records.
        is_complete: The file was there already.
    """

    def __init__(self, path: str, header: Header) -> None:
        self.path, self.header = Path(path), header
        self.part, self.state = Path(f"{path}.part"), Path(f"{path}.part.state")
        self.documents = self.entries = 0
        self.is_complete = False
        if self.path.exists():
            if read_header(path) != header:
                raise ConfigError(f"{path} is of another teacher or other data: remove it, or give another -o")
            self.is_complete = True
            return
        try:
            self._file = open(os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")  # noqa: SIM115
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self.part} is being written by another process") from None
        except OSError as error:
            raise ConfigError(f"cannot write {self.part}: {error.strerror}") from None
        self._crc = self._resume()
        self._whole = self.entries, self._crc  # up to the last whole document

    def _resume(self) -> int:
        """Goes to the end of the complete records, and returns their CRC."""
        start = self._file.read(HEADER_BYTES)
        if not self.state.exists():
            if start and not self.header.encode().startswith(start):
                raise ConfigError(f"{self.part} is of another teacher or other data: remove it, or give another -o")
            self._file.seek(0)
            self._file.truncate()
            self._file.write(self.header.encode())
            return zlib.crc32(self.header.encode())
        try:
            saved = json.loads(read_regular(self.state, HEADER_BYTES))
            documents, entries, crc = (int(saved[name]) for name in ("documents", "entries", "crc"))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise ConfigError(f"{self.state} is damaged: remove {self.part} and {self.state}") from None
        if start != self.header.encode():
            raise ConfigError(f"{self.part} is of another teacher or other data: remove it, or give another -o")
        end = HEADER_BYTES + entries * self.header.dtype.itemsize
        self._file.seek(0)
        if not 0 <= entries <= self.header.entries or _crc(self._file, end) != (crc, end):
            raise ConfigError(f"{self.part} is damaged: remove {self.part} and {self.state}")
        self._file.truncate(end)
        self._file.seek(end)
        self.documents, self.entries = documents, entries
        return crc

    def add(self, documents: int, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Appends records, both arrays (records, choices). `documents`: how many end with them."""
        records = np.empty(len(ids), self.header.dtype)
        records["ids"], records["logprobs"] = ids, logprobs
        data = records.tobytes()
        with self._writing():
            self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self.documents, self.entries = self.documents + documents, self.entries + len(records)
        if documents:
            self._whole = self.entries, self._crc

    def save(self) -> None:
        """Makes the records of whole documents survive the end of this process."""
        with self._writing():
            self._file.flush()
            os.fsync(self._file.fileno())
            temporary = self.state.with_name(f"{self.state.name}.new")
            entries, crc = self._whole
            values = {"documents": self.documents, "entries": entries, "crc": crc}
            write_synced(temporary, json.dumps(values).encode())
            temporary.replace(self.state)

    def finish(self) -> None:
        """Completes the file and gives it its name."""
        assert self.entries == self.header.entries, "all documents are written"
        with self._writing():
            self._file.write(self._crc.to_bytes(CRC_BYTES, "little"))
            self._file.flush()
            os.fsync(self._file.fileno())
            self.part.replace(self.path)
            self.state.unlink(missing_ok=True)
            self._file.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Makes an error of the `with` block one line."""
        try:
            yield
        except OSError as error:
            raise EngineError(
                f"{self.part} could not be written: {error.strerror}; make room and start again"
            ) from None


def _crc(file: Any, end: int) -> tuple[int, int]:
    """The CRC-32 of the next bytes up to `end`, and the bytes that there were."""
    crc = at = 0
    while at < end and (data := file.read(min(READ_BYTES, end - at))):
        crc, at = zlib.crc32(data, crc), at + len(data)
    return crc, at
