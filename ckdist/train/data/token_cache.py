"""Documents as tokens on disk, made once and then mapped into memory by every rank.

A cache is a folder named by a digest of its inputs. It gets this name when it is complete.
"""

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from ckdist.errors import ConfigError, EngineError, RequestError
from ckdist.progress import ProgressBar
from ckdist.regular_file import sync, write_synced
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.train.data.chats import WriteChats
from ckdist.train.data.documents import read_documents
from ckdist.train.data.records import BadLine, Document

log = logging.getLogger(__name__)

VERSION = 2
BATCH_CHARACTERS = 4 << 20  # tokenised at once, on all cores
SHOWN_BAD_LINES = 5
LINE_BITS = 40  # low bits of a place; the file's index is above them

Waiting: TypeAlias = tuple[Document, str, list[tuple[int, int]] | None]  # document, text, spans that are learned
Encoded: TypeAlias = tuple[str, list[int], np.ndarray | None]  # file:line, ids, mask of a chat's learned tokens


@dataclass(frozen=True)
class TokenCache:
    """Documents end to end. Document d is tokens[starts[d]:starts[d + 1]]."""

    tokens: np.ndarray  # uint16 or uint32 (tokens,)
    starts: np.ndarray  # int64 (documents + 1,)
    learned: np.ndarray | None  # uint8 (tokens,): 1 if the loss is taken on the token; None: on all
    digest: str  # of the tokens; must be equal on all ranks
    skipped: int  # bad lines that were left out
    places: np.ndarray  # int64 (documents,): index in `files` << LINE_BITS | line
    files: tuple[str, ...]

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.starts) - 1

    def where(self, document: int) -> str:
        """The start of a document, as file:line."""
        place = int(self.places[document])
        return f"{self.files[place >> LINE_BITS]}:{place & ((1 << LINE_BITS) - 1)}"


def open_cache(
    directory: Path,
    files: list[Path],
    tokenizer: Tokenizer,
    text_column: str,
    bad_lines: str,
    write_chats: WriteChats,
    progress: bool = False,
) -> TokenCache:
    """Returns the tokens of `files`, and makes them first if they do not exist.

    `bad_lines`: error or skip. `progress`: show a bar and warnings. Raises ConfigError if a line is bad or there are no
    tokens, EngineError if the cache cannot be written.
    """
    folder = directory / cache_key(files, tokenizer, text_column, bad_lines)
    is_made = (folder / "meta.json").is_file()
    if not is_made:
        _make(folder, files, tokenizer, text_column, bad_lines, write_chats, progress)
    meta = json.loads((folder / "meta.json").read_text())
    if is_made and progress and meta["skipped"]:
        log.warning("%d lines in all were left out when these tokens were made", meta["skipped"])

    def load(name: str, dtype: DTypeLike, size: int) -> np.ndarray:
        """Maps a file of the cache."""
        return np.memmap(folder / name, dtype, "r", shape=(size,))

    tokens = load("tokens.bin", meta["dtype"], meta["tokens"])
    starts = load("starts.bin", np.int64, meta["documents"] + 1)
    learned = load("learned.bin", np.uint8, meta["tokens"]) if meta["chats"] else None
    places = load("places.bin", np.int64, meta["documents"])
    return TokenCache(tokens, starts, learned, meta["digest"], meta["skipped"], places, tuple(meta["files"]))


def cache_key(files: list[Path], tokenizer: Tokenizer, text_column: str, bad_lines: str) -> str:
    """A digest of the files (names, sizes, times), the tokenizer, and the rules of reading."""
    rules = [
        VERSION,
        text_column,
        bad_lines,
        tokenizer.prefix,
        sorted(tokenizer.eos_token_ids),
        dict(tokenizer.templates),
    ]
    digest = hashlib.sha256(json.dumps(rules).encode() + tokenizer.backend.to_str().encode())
    for file in files:
        stat = file.stat()
        digest.update(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """The token after a text, or None.

    If several tokens end something, the first in the vocabulary ends texts; the others end turns.
    """
    return min(tokenizer.eos_token_ids, default=None)


def _make(
    folder: Path,
    files: list[Path],
    tokenizer: Tokenizer,
    text_column: str,
    bad_lines: str,
    write_chats: WriteChats,
    progress: bool,
) -> None:
    """Makes a cache in `folder`. Raises ConfigError for a fault that the user can mend, EngineError if it cannot be
    written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".tokens-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(f"cannot write in {folder.parent}: {error.strerror}; set cache_dir") from None
    try:
        with _Writer(temporary, tokenizer.vocab_size) as writer:
            refuse = lambda bad: _refuse(bad, bad_lines, writer)
            if not tokenizer.templates:
                write_chats = lambda chats: [RequestError("the tokenizer has no chat template")] * len(chats)
            for batch in _batches(_read(files, text_column, bad_lines, writer, progress)):
                for where, ids, learned in _encode_batch(_written(batch, write_chats, refuse), tokenizer):
                    writer.add(where, ids, learned)
        if not writer.tokens:
            held = f"{files[0]} has" if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files have"
            raise ConfigError(f"{held} no text" + (f" but {writer.skipped} bad lines" if writer.skipped else ""))
        writer.finish()
        try:
            temporary.rename(folder)
        except OSError:  # another host made it in the meantime
            if not (folder / "meta.json").is_file():
                raise
        log.info("%d documents, %d tokens in %s", writer.documents, writer.tokens, folder)
    except OSError as error:
        raise EngineError(
            f"the token cache {folder} could not be written: {error.strerror or error}; make room, or set cache_dir"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _Writer:
    """Writes the files of a cache. `tokens`, `documents` and `skipped` count; the context manager closes the files."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.folder = folder
        self.dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self.tokens = self.documents = self.skipped = 0
        self.chats = False
        self.files: dict[str, int] = {}
        self.digest = hashlib.sha256()

    def __enter__(self) -> "_Writer":
        self._tokens, self._starts, self._learned, self._places = (
            open(self.folder / f"{name}.bin", "wb")  # noqa: SIM115 - closed by __exit__
            for name in ("tokens", "starts", "learned", "places")
        )
        self._starts.write(np.int64(0).tobytes())
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._tokens, self._starts, self._learned, self._places):
            file.close()

    def add(self, where: str, ids: list[int], learned: np.ndarray | None) -> None:
        """Appends a document. `learned`: bool (tokens,) of a chat. Raises OSError if the disk is full."""
        path, _, line = where.rpartition(":")
        place = self.files.setdefault(path, len(self.files)) << LINE_BITS | int(line)
        data = np.asarray(ids, self.dtype).tobytes()
        flags = np.ones(len(ids), np.uint8) if learned is None else learned.astype(np.uint8)
        self.chats |= learned is not None
        self.tokens += len(ids)
        self.documents += 1
        self._tokens.write(data)
        self._learned.write(flags.tobytes())
        self._starts.write(np.int64(self.tokens).tobytes())
        self._places.write(np.int64(place).tobytes())
        self.digest.update(data + flags.tobytes())

    def skip(self, bad: BadLine) -> None:
        """Counts a bad line, and logs the first SHOWN_BAD_LINES."""
        self.skipped += 1
        if self.skipped <= SHOWN_BAD_LINES:
            log.warning("left out: %s %s", bad.where, bad.why)

    def finish(self) -> None:
        """Writes meta.json and syncs all files. Raises OSError on failure."""
        if self.skipped:
            log.warning("%d lines in all were left out", self.skipped)
        if not self.chats:
            (self.folder / "learned.bin").unlink()
        meta = {
            "version": VERSION,
            "documents": self.documents,
            "tokens": self.tokens,
            "dtype": self.dtype.name,
            "chats": self.chats,
            "skipped": self.skipped,
            "files": list(self.files),
        }
        for path in self.folder.iterdir():  # synced before the folder gets its name
            sync(path)
        write_synced(self.folder / "meta.json", json.dumps(meta | {"digest": self.digest.hexdigest()}).encode())


def _refuse(bad: BadLine, bad_lines: str, writer: _Writer) -> None:
    """Counts a bad line. Raises ConfigError if `bad_lines` is error."""
    if bad_lines == "error":
        raise ConfigError(f'{bad.where} {bad.why}; mend it, or leave such lines out with bad_lines = "skip"')
    writer.skip(bad)


def _read(files: list[Path], text_column: str, bad_lines: str, writer: _Writer, progress: bool) -> Iterator[Document]:
    """Yields the documents of all files, with a progress bar. Raises ConfigError as `read_documents` and `_refuse`."""
    total = sum(file.stat().st_size for file in files)
    with ProgressBar(total, "B", "tokenising", progress) as bar:
        for file in files:
            for document in read_documents(file, text_column):
                if isinstance(document, BadLine):
                    _refuse(document, bad_lines, writer)
                    continue
                yield document
            bar.update(file.stat().st_size)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Groups documents that are rendered and tokenised together."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text) + sum(len(str(message.get("content"))) for message in document.messages or ())
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def _written(batch: list[Document], write_chats: WriteChats, refuse: Callable[[BadLine], None]) -> list[Waiting]:
    """Renders chats. Those that cannot be rendered are refused."""
    chats = iter(
        write_chats([(document.messages, document.tools) for document in batch if document.messages is not None])
    )
    waiting: list[Waiting] = []
    for document in batch:
        if document.messages is None:
            waiting.append((document, document.text, None))
            continue
        written = next(chats)
        if isinstance(written, RequestError):
            refuse(BadLine(document.where, f"is a chat that cannot be written: {written}"))
        else:
            waiting.append((document, *written))
    return waiting


def _encode_batch(waiting: list[Waiting], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Tokenises on all cores. Yields file:line, ids and, for chats, a mask of learned tokens."""
    ending = end_of_text(tokenizer)
    encodings = (
        tokenizer.backend.encode_batch([text for _, text, _ in waiting], add_special_tokens=False) if waiting else []
    )
    for (document, _, spans), encoding in zip(waiting, encodings, strict=False):
        ids = encoding.ids
        if spans is not None:
            begins = np.array([begin for begin, _ in encoding.offsets], np.int64)
            learned = np.zeros(len(ids), bool)
            for begin, end in spans:
                learned |= (begins >= begin) & (begins < end)
            yield document.where, ids, learned
            continue
        if document.begins and tuple(ids[: len(tokenizer.prefix)]) != tokenizer.prefix:
            ids = [*tokenizer.prefix, *ids]
        if document.ends and ending is not None:
            ids = [*ids, ending]
        if ids:
            yield document.where, ids, None
