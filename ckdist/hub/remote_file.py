"""Partial local copies of files at a URL: each host holds the parts of a model that its ranks need.

The local file has the size of the whole, with holes for parts that were not fetched. NAME.parts records its URL and the
blocks that are present; a file without such a record is complete. `web_file` reads https, fsspec reads the URLs of
object stores.
"""

import io
import json
import logging
import os
import pathlib
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

from ckdist.errors import CkdistError, ConfigError, FetchError
from ckdist.hub.local_copy import has_parts, parts_path
from ckdist.hub.lock import file_lock
from ckdist.hub.model_url import WEB, NotThereError, fragment_of, scheme_of, shown, typed_line
from ckdist.hub.store import disk_problem, sha256_of, store_folder
from ckdist.hub.web_file import WebFile
from ckdist.layout import Range
from ckdist.progress import ProgressBar
from ckdist.regular_file import open_regular, read_regular, replace_text

log = logging.getLogger(__name__)

BLOCK = 1 << 16  # bytes; only whole blocks are fetched
MAX_BYTES = 1 << 50  # largest file
REQUEST_BLOCKS = 256  # most blocks of one request
REQUESTS = 4  # concurrent requests
RECORD_SECONDS = 2.0  # between two updates of the record
MAX_RECORD_BYTES = 64 << 20
ATTEMPTS = 4  # per request; the pause between them doubles
# keys that identify a version of a file, for all kinds of object stores
STAMPS = ("ETag", "etag", "Last-Modified", "LastModified", "mtime", "md5Hash", "checksum")


@dataclass(frozen=True)
class Parts:
    """The contents of NAME.parts."""

    url: str
    size: int  # bytes
    stamp: dict[str, str]  # identifies the file's version at the URL
    here: tuple[Range, ...] = ()  # fetched blocks [begin, end), ascending
    sha256: str = ""  # of the whole file, after it was compared with the URL's

    def without_those_here(self, blocks: Iterable[Range]) -> list[Range]:
        """Returns the parts of ascending ranges of blocks that are still missing."""
        missing = []
        for begin, end in blocks:
            at = begin
            for first, last in self.here:
                if first < end and at < last:
                    missing.append((at, first))
                    at = max(at, last)
            missing.append((at, end))
        return joined(missing)

    def with_these(self, blocks: Iterable[Range]) -> "Parts":
        """Adds fetched blocks."""
        return replace(self, here=tuple(joined([*self.here, *blocks])))


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Sorts ranges, merges those that touch, and drops empty ones."""
    found: list[Range] = []
    for begin, end in sorted(ranges):
        if begin >= end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def make_remote(url: str, path: pathlib.Path) -> None:
    """Creates or updates the local copy `path` of the file at `url`. Fetched parts stay unless the file has changed.

    If the URL ends in #sha256=HEX, the file is fetched whole and compared once.

    Raises:
        FetchError: The file is missing, unreachable or another one, or the store cannot be written.
        ConfigError: The URL is of an unknown kind.
    """
    digest = "".join(fragment_of(url).digests)
    known = _read(path)
    if digest and known is not None and known.sha256 == digest and path.is_file() and path.stat().st_size == known.size:
        return
    _stand_for(url, path)
    if digest:
        _compare(path, digest)


def _stand_for(url: str, path: pathlib.Path) -> None:
    size, stamp = _described(url)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with file_lock(_lock_path(path)):
            parts = _read(path)
            as_before = parts is not None and (parts.size, parts.stamp) == (size, stamp)
            if parts is not None and as_before and path.is_file() and path.stat().st_size == size:
                _write(path, replace(parts, url=url))
                return
            path.unlink(missing_ok=True)  # a process that has the old file open keeps reading it
            _write(path, Parts(url, size, stamp))
            with open(path, "wb") as file:
                file.truncate(size)
    except OSError as error:
        raise FetchError(disk_problem(path.parent, error)) from None


def _compare(path: pathlib.Path, digest: str) -> None:
    """Fetches the whole file. If its SHA-256 is not `digest`, removes it and raises FetchError."""
    parts = _read(path)
    assert parts is not None, "make_remote has written the record"
    fetch_ranges(path, [(0, parts.size)], show_progress=True)
    try:
        found = sha256_of(path)
        with file_lock(_lock_path(path)):
            if found == digest:
                _write(path, replace(_read(path) or parts, sha256=digest))
                return
            parts_path(path).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
    except OSError as error:
        raise FetchError(disk_problem(path.parent, error)) from None
    raise FetchError(
        f"{shown(parts.url)} has SHA-256 {found[:16]}…, but the URL requires {digest[:16]}…: it is damaged or "
        "another file; nothing was kept"
    )


def fetch_ranges(path: pathlib.Path, ranges: Iterable[Range], show_progress: bool = False) -> None:
    """Fetches the missing bytes of `path` in each [begin, end) of `ranges`. Returns at once if the file is complete.

    One process of a host fetches at a time.

    Args:
        show_progress: Log a line and, on a terminal, show a bar.

    Raises:
        FetchError: The URL cannot be read, or the disk is full. Fetched data is kept.
    """
    if not has_parts(path) or (parts := _read(path)) is None:
        return
    last = -(-parts.size // BLOCK)
    blocks = joined((max(0, begin) // BLOCK, min(-(-end // BLOCK), last)) for begin, end in ranges)
    if not parts.without_those_here(blocks):
        return
    try:
        with file_lock(_lock_path(path)):
            parts = _read(path) or parts
            if missing := parts.without_those_here(blocks):
                _fetch(path, parts, missing, show_progress)
    except OSError as error:
        raise FetchError(
            f"{path} cannot be written ({error.strerror or error}): make room; the fetched data is kept"
        ) from None


def remote_folder() -> pathlib.Path:
    """Returns the folder of local copies."""
    return store_folder() / "remote"


def stamp_of(path: pathlib.Path) -> str:
    """Returns the server's version of the file at a URL as a text; "" for a complete file."""
    parts = _read(path)
    return json.dumps(parts.stamp, sort_keys=True) if parts else ""


class FetchingFile(io.FileIO):
    """Fetches missing bytes when they are read."""

    read, readall = cast("Any", io.RawIOBase.read), io.RawIOBase.readall  # these call `readinto`

    def __init__(self, path: pathlib.Path):
        with open_regular(path) as file:
            super().__init__(os.dup(file.fileno()))
        self.path = path

    def readinto(self, buffer: Any) -> int:
        """Reads bytes at the offset and returns their number. Raises FetchError as `fetch_ranges` does."""
        at = self.tell()
        fetch_ranges(self.path, [(at, at + len(memoryview(buffer).cast("B")))])
        return super().readinto(buffer)


class _Stored:
    """A file in an object store, read with fsspec."""

    def __init__(self, url: str):
        import fsspec

        try:
            self.files, self.name = fsspec.core.url_to_fs(url.partition("#")[0])
        except ImportError as error:
            raise ConfigError(f"{shown(url)} cannot be read here: {error}; install that package") from None
        except ValueError as error:
            raise ConfigError(f"{shown(url)} is not a URL that a model is read from: {typed_line(error)}") from None

    def describe(self) -> tuple[int, dict[str, str]]:
        """Does the same as `WebFile.describe`."""
        found = self.files.info(self.name)
        size = found.get("size")
        is_file = found.get("type", "file") == "file" and type(size) is int
        return size if is_file else 0, {key: str(found[key]) for key in STAMPS if key in found}

    def read(self, begin: int, end: int, size: int, _stamp: dict[str, str]) -> bytes:
        """Does the same as `WebFile.read`."""
        with self.files.open(self.name, "rb", cache_type="none", size=size) as file:
            file.seek(begin)
            return cast("bytes", file.read(end - begin))


def _at(url: str) -> WebFile | _Stored:
    return WebFile(url) if scheme_of(url) in WEB else _Stored(url)


def _described(url: str) -> tuple[int, dict[str, str]]:
    """Returns the size of the file at a URL, and the values that identify its version."""
    try:
        size, stamp = _at(url).describe()
    except CkdistError:
        raise
    except FileNotFoundError:
        raise NotThereError(f"{shown(url)} does not exist: check its spelling") from None
    except Exception as error:  # of any file system
        raise FetchError(f"{shown(url)} could not be read: {typed_line(error)}; try again") from None
    if not 0 < size <= MAX_BYTES:
        raise FetchError(f"{shown(url)} does not say how large it is, so parts of it cannot be read: fetch it whole")
    return size, stamp


def _fetch(path: pathlib.Path, parts: Parts, missing: Sequence[Range], show_progress: bool) -> None:
    """Fetches blocks, and records them as they arrive."""
    bounds = [(begin * BLOCK, min(end * BLOCK, parts.size)) for begin, end in missing]
    wanted = sum(end - begin for begin, end in bounds)
    if show_progress:
        log.info("reading %.1f of %.1f MB of %s from %s", wanted / 1e6, parts.size / 1e6, path.name, shown(parts.url))
    pieces = [
        (begin, min(begin + REQUEST_BLOCKS, end))
        for first, end in missing
        for begin in range(first, end, REQUEST_BLOCKS)
    ]
    read = partial(_read_blocks, _at(parts.url), parts)
    with (
        open(path, "r+b", buffering=0) as file,
        ProgressBar(wanted, "B", f"reading {path.name}", show_progress) as bar,
        ThreadPoolExecutor(REQUESTS, "fetch") as pool,
    ):
        recorded = time.monotonic()
        for i in range(0, len(pieces), REQUESTS):
            turn = pieces[i : i + REQUESTS]
            for (begin, _), data in zip(turn, pool.map(read, turn), strict=True):
                at = begin * BLOCK
                while at < begin * BLOCK + len(data):
                    at += os.pwrite(file.fileno(), data[at - begin * BLOCK :], at)
                bar.update(len(data))
            parts = parts.with_these(turn)
            if time.monotonic() > recorded + RECORD_SECONDS or i + REQUESTS >= len(pieces):
                os.fdatasync(file.fileno())  # the data is on disk before the record lists it
                _write(path, parts)
                recorded = time.monotonic()


def _read_blocks(file: WebFile | _Stored, parts: Parts, blocks: Range) -> bytes:
    """The bytes of blocks [begin, end). Raises FetchError if they cannot be read."""
    begin, end = blocks[0] * BLOCK, min(blocks[1] * BLOCK, parts.size)
    url, why = shown(parts.url), ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(2.0 ** (attempt - 2))
        try:
            data = file.read(begin, end, parts.size, parts.stamp)
        except CkdistError:
            raise
        except FileNotFoundError:
            raise FetchError(f"{url} does not exist any more; the fetched data is kept") from None
        except ValueError as error:
            raise FetchError(
                f"{url} cannot be read in parts ({typed_line(error)}): fetch it, and use its path"
            ) from None
        except Exception as error:  # of any file system
            why = typed_line(error)
            continue
        if len(data) == end - begin:
            return data
        why = f"{len(data)} bytes arrived instead of {end - begin}"
    raise FetchError(f"{url} could not be read at byte {begin}: {why}; try again, the fetched data is kept")


def _read(path: pathlib.Path) -> Parts | None:
    """Reads the record of a file; None for a complete file. Raises FetchError if the record is damaged."""
    record = parts_path(path)
    try:
        said = json.loads(read_regular(record, MAX_RECORD_BYTES))
        here = tuple((begin, end) for begin, end in said["here"])
        stamp = said["stamp"] if isinstance(said["stamp"], dict) else {}
        return Parts(said["url"], said["size"], stamp, here, said.get("sha256", ""))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FetchError(
            f"{record} cannot be read ({typed_line(error)}): remove {path.parent}, and try again"
        ) from None


def _write(path: pathlib.Path, parts: Parts) -> None:
    """Replaces the record atomically. Only its owner may read it, because URLs may contain a key."""
    replace_text(parts_path(path), json.dumps(asdict(parts)) + "\n", 0o600)


def _lock_path(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + ".lock")
