"""Documents as tokens on disk, made once and then mapped into memory by every rank.

A cache is a folder named by a digest of its inputs. It gets this name when it is complete.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from ckdist.errors import ConfigError, EngineError, RequestError
from ckdist.progress import ProgressBar
from ckdist.regular_file import sync, write_synced
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.train.data.chats import WriteChats, Written
from ckdist.train.data.data_report import SHOWN_BAD_LINES, DataReport
from ckdist.train.data.documents import read_documents
from ckdist.train.data.preferences import read_preference, write_answers
from ckdist.train.data.record_forms import COMPLETION
from ckdist.train.data.records import BadLine, Document
from ckdist.train.data.sequences import LearnedTokens, encode_turns
from ckdist.train.data.turns import Turn, end_of_text

log = logging.getLogger(__name__)

VERSION = 3
BATCH_CHARACTERS = 4 << 20  # tokenised at once, on all cores
LINE_BITS = 40  # low bits of a place; the file's index is above them

Waiting: TypeAlias = tuple[Document, list[Turn] | None]  # a document, and the turns of a chat
Encoded: TypeAlias = tuple[Document, list[LearnedTokens]]


@dataclass(frozen=True)
class TokenCache:
    """Documents end to end. Document d is tokens[starts[d]:starts[d + 1]].

    A document is a text, or a sequence of a chat. Those of one record follow each other and have the same place.
    """

    tokens: np.ndarray  # uint16 or uint32 (tokens,)
    starts: np.ndarray  # int64 (documents + 1,)
    learned: np.ndarray | None  # uint8 (tokens,): 1 if the loss is taken on the token; None: on all
    digest: str  # of the tokens; must be equal on all ranks
    places: np.ndarray  # int64 (documents,): index in `files` << LINE_BITS | line
    files: tuple[str, ...]
    report: DataReport = field(default_factory=DataReport)
    labels: np.ndarray | None = None  # uint8 (documents,): of preferences, 1 for a good answer

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.starts) - 1

    def file_numbers(self) -> np.ndarray:
        """int64 (documents,): the index in `files` of each document."""
        return np.asarray(self.places) >> LINE_BITS

    def where(self, document: int) -> str:
        """The start of a document, as file:line."""
        place = int(self.places[document])
        return f"{self.files[place >> LINE_BITS]}:{place & ((1 << LINE_BITS) - 1)}"


@dataclass(frozen=True)
class _Rules:
    """The arguments of `open_cache` that decide how files are read."""

    tokenizer: Tokenizer
    text_column: str
    bad_lines: str
    write_chats: WriteChats
    progress: bool
    quiet: bool
    kind: str


def open_cache(
    directory: Path,
    files: list[Path],
    tokenizer: Tokenizer,
    text_column: str,
    bad_lines: str,
    write_chats: WriteChats,
    progress: bool = False,
    quiet: bool = False,
    kind: str = "",
) -> TokenCache:
    """Returns the tokens of `files`, and makes them first if they do not exist.

    Args:
        bad_lines: error or skip.
        progress: Show a bar and warnings.
        quiet: Log no bad lines.
        kind: pairs or labels, for preferences.

    Raises:
        ConfigError: A line is bad, or there are no tokens.
        EngineError: The cache cannot be written.
    """
    rules = _Rules(tokenizer, text_column, bad_lines, write_chats, progress, quiet, kind)
    folder = directory / _cache_key(files, rules)
    is_made = (folder / "meta.json").is_file()
    if not is_made:
        _make(folder, files, rules)
    meta = json.loads((folder / "meta.json").read_text())
    if is_made and progress and meta["report"]["skipped"]:
        log.warning("%d lines in all were left out when these tokens were made", meta["report"]["skipped"])

    def load(name: str, dtype: DTypeLike, size: int) -> np.ndarray:
        """Maps a file of the cache."""
        return np.memmap(folder / name, dtype, "r", shape=(size,))

    tokens = load("tokens.bin", meta["dtype"], meta["tokens"])
    starts = load("starts.bin", np.int64, meta["documents"] + 1)
    learned = load("learned.bin", np.uint8, meta["tokens"]) if meta["chats"] else None
    places = load("places.bin", np.int64, meta["documents"])
    report = DataReport(**meta["report"])
    labels = load("labels.bin", np.uint8, meta["documents"]) if kind else None
    return TokenCache(tokens, starts, learned, meta["digest"], places, tuple(meta["files"]), report, labels)


def _cache_key(files: list[Path], rules: _Rules) -> str:
    """A digest of the files (names, sizes, times), the tokenizer, and the rules of reading."""
    tokenizer = rules.tokenizer
    words = [VERSION, rules.text_column, rules.bad_lines, tokenizer.prefix, sorted(tokenizer.eos_token_ids)]
    words += [dict(tokenizer.templates), *([rules.kind] if rules.kind else [])]
    digest = hashlib.sha256(json.dumps(words).encode() + tokenizer.backend.to_str().encode())
    for file in files:
        stat = file.stat()
        digest.update(os.fsencode(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0"))
    return digest.hexdigest()[:32]


def _make(folder: Path, files: list[Path], rules: _Rules) -> None:
    """Makes a cache in `folder`. Raises ConfigError for a fault that the user can mend, EngineError if it cannot be
    written.
    """
    absent = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".tokens-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(
            f"cannot write in {folder.parent}: {error.strerror}; give another output folder, or set cache_dir"
        ) from None
    try:
        with _Writer(temporary, rules) as writer:
            for batch in _batches(_read(files, rules, writer)):
                waiting = list(_written(batch, rules, writer))
                for document, sequences in _encode_batch(waiting, rules.tokenizer):
                    writer.add(document, sequences)
                for document, turns in waiting:
                    writer.count(document, turns or [])
        if not writer.tokens:
            held = f"{files[0]} has" if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files have"
            bad = writer.report
            why = f" ({bad.skipped} bad lines): {bad.bad[0]}" if bad.bad else ""
            raise ConfigError(f"{held} no text{why}")
        writer.finish()
        try:
            temporary.rename(folder)
        except OSError:  # another host made it in the meantime
            if not (folder / "meta.json").is_file():
                raise
        (log.debug if rules.quiet else log.info)(
            "%d documents, %d tokens in %s", writer.documents, writer.tokens, folder
        )
    except OSError as error:
        raise EngineError(
            f"the token cache {folder} could not be written: {error.strerror or error}; make room, or set cache_dir"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):  # they hold the cache, or what another process has written
            for parent in absent:
                parent.rmdir()


class _Writer:
    """Writes the files of a cache. `tokens`, `documents` and `report` count; the context manager closes the files."""

    def __init__(self, folder: Path, rules: _Rules) -> None:
        self.folder, self.rules, self.labels = folder, rules, bytearray()
        self.dtype = np.dtype(np.uint16 if rules.tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self.tokens = self.documents = 0
        self.chats = False
        self.files: dict[str, int] = {}
        self.digest = hashlib.sha256()
        self.report = DataReport()

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

    def add(self, document: Document, sequences: Iterable[LearnedTokens]) -> None:
        """Appends the sequences of a record. Raises OSError if the disk is full."""
        sequences = list(sequences)
        if self.rules.kind and len(sequences) != len(document.labels):
            self.skip(BadLine(document.where, "has an answer without a token"))
            return
        self.labels += bytes(document.labels)
        path, _, line = document.where.rpartition(":")
        place = self.files.setdefault(path, len(self.files)) << LINE_BITS | int(line)
        self.chats |= document.messages is not None
        for ids, learned in sequences:
            data = np.asarray(ids, self.dtype).tobytes()
            flags = learned.astype(np.uint8).tobytes()
            self.tokens += len(ids)
            self.documents += 1
            self._tokens.write(data)
            self._learned.write(flags)
            self._starts.write(np.int64(self.tokens).tobytes())
            self._places.write(np.int64(place).tobytes())
            self.digest.update(data + flags)
            self.report.sequences += document.messages is not None

    def count(self, document: Document, turns: Sequence[Turn]) -> None:
        """Counts a record and the findings of its turns."""
        if document.begins:
            self.report.add_record(document.form)
            if document.preference and not self.rules.kind:
                self.report.add_note("records of preferences: no label and no rejected answer is read", document.where)
        self.report.answers += len(turns)
        for turn in turns:
            for note in turn.notes:
                self.report.add_note(note, document.where)

    def refuse(self, bad: BadLine) -> None:
        """Counts a bad line. Raises ConfigError if `bad_lines` is error."""
        if self.rules.bad_lines == "error":
            raise ConfigError(
                f'{bad.where} {bad.why}; mend it, or leave such lines out with bad_lines = "skip" (tune: --skip-bad)'
            )
        self.skip(bad)

    def skip(self, bad: BadLine) -> None:
        """Counts a bad line, and logs the first SHOWN_BAD_LINES."""
        self.report.add_bad(bad.where, bad.why)
        if self.report.skipped <= SHOWN_BAD_LINES and not self.rules.quiet:
            log.warning("left out: %s %s", bad.where, bad.why)

    def finish(self) -> None:
        """Writes meta.json and syncs all files. Raises OSError on failure."""
        if self.report.skipped and not self.rules.quiet:
            log.warning("%d lines in all were left out", self.report.skipped)
        if not self.chats:
            (self.folder / "learned.bin").unlink()
        if self.rules.kind:
            write_synced(self.folder / "labels.bin", bytes(self.labels))
            self.digest.update(self.labels)
        meta: dict[str, Any] = {
            "version": VERSION,
            "documents": self.documents,
            "tokens": self.tokens,
            "dtype": self.dtype.name,
            "chats": self.chats,
            "files": list(self.files),
            "report": asdict(self.report),
        }
        for path in self.folder.iterdir():  # synced before the folder gets its name
            sync(path)
        write_synced(self.folder / "meta.json", json.dumps(meta | {"digest": self.digest.hexdigest()}).encode())


def _read(files: list[Path], rules: _Rules, writer: _Writer) -> Iterator[Document]:
    """Yields the documents of all files, with a progress bar. Raises ConfigError as `read_documents` and `refuse`."""
    total = sum(file.stat().st_size for file in files)
    with ProgressBar(total, "B", "tokenising", rules.progress) as bar:
        for file in files:
            for read in read_documents(file, rules.text_column):
                document = read_preference(read, rules.kind) if rules.kind else read
                if isinstance(document, BadLine):
                    writer.refuse(document)
                else:
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


def _written_answers(documents: list[Document], tokenizer: Tokenizer, write_chats: WriteChats) -> list[Written]:
    """The turns of preferences. Without a template, a prompt and its answer are plain text."""
    if not tokenizer.templates:
        documents = [replace(document, is_plain=True) for document in documents]
    plain = lambda _, chat: _plain_turn(Document("", messages=chat, form=COMPLETION), tokenizer)
    return write_answers(documents, write_chats, plain)


def _plain_turn(document: Document, tokenizer: Tokenizer) -> Written:
    """A prompt and its completion as plain text, for a tokenizer without a chat template."""
    messages = document.messages or []
    texts = [message["content"] for message in messages]
    if document.form != COMPLETION or len(messages) != 2 or not all(isinstance(text, str) for text in texts):
        return RequestError("the tokenizer has no chat template")
    ending = end_of_text(tokenizer)
    completion = texts[1] + ("" if ending is None else tokenizer.token_text(ending))
    return [
        Turn("".join(map(tokenizer.token_text, tokenizer.prefix)) + texts[0], completion, [(0, len(completion))], [])
    ]


def _turns_of(chats: list[Document], rules: _Rules) -> list[Written]:
    """The turns of chats, or why they cannot be written."""
    if rules.kind:
        return _written_answers(chats, rules.tokenizer, rules.write_chats)
    if not rules.tokenizer.templates:
        return [_plain_turn(chat, rules.tokenizer) for chat in chats]
    return rules.write_chats([(chat.messages or [], chat.tools) for chat in chats])


def _written(batch: list[Document], rules: _Rules, writer: _Writer) -> Iterator[Waiting]:
    """Renders chats. Those that cannot be rendered are refused."""
    chats = iter(_turns_of([document for document in batch if document.messages is not None], rules))
    for document in batch:
        written = None if document.messages is None else next(chats)
        if isinstance(written, RequestError):
            writer.refuse(BadLine(document.where, f"is a chat that cannot be written: {written}"))
        else:
            yield document, written


def _encode_batch(waiting: list[Waiting], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Tokenises on all cores."""
    ending = end_of_text(tokenizer)
    texts = [document.text for document, turns in waiting if turns is None]
    encodings = iter(tokenizer.backend.encode_batch(texts, add_special_tokens=False) if texts else [])
    chats = encode_turns([turns for _, turns in waiting if turns is not None], tokenizer)
    for document, turns in waiting:
        if turns is not None:
            yield document, [sequence for sequence in next(chats) if sequence.ids]
            continue
        ids = next(encodings).ids
        if document.begins and tuple(ids[: len(tokenizer.prefix)]) != tokenizer.prefix:
            ids = [*tokenizer.prefix, *ids]
        if document.ends and ending is not None:
            ids = [*ids, ending]
        if ids:
            yield document, [LearnedTokens(ids, np.ones(len(ids), bool))]
