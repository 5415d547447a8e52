"""The files of a prompt cache on disk: DIR/<hash>/rank-0-of-2.blocks and others, private to one user and one job.

The hash is that of everything that the bytes of a block depend on, so another model or layout has another folder.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckdist import native
from ckdist.config.engine_config import folder_and_size
from ckdist.errors import ConfigError

FORMAT = 1  # of the folder
HEADER = native.dtype("ckdist_slab_header")
MAGIC = b"ckslab01"
ABOUT, LOCK, SECRET = "about.json", "lock", "secret"
SECRET_BYTES = 32
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass
class SlabFiles:
    """The two files of one rank's slab. `bytes`: data of one slot."""

    headers: int
    data: int
    bytes: int
    slots: int = 0

    @property
    def stride(self) -> int:
        """Bytes from one slot's data to the next."""
        return native.lib.ckdist_slab_stride(self.bytes)

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of one slot with its header."""
        return self.stride + HEADER.itemsize

    def resize(self, slots: int) -> None:
        """Sets the number of slots, and gives the bytes after them back to the file system."""
        self.slots = slots
        for file, size in ((self.headers, slots * HEADER.itemsize), (self.data, slots * self.stride)):
            if os.fstat(file).st_size > size:
                os.ftruncate(file, size)

    def entries(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (slots, headers) of the slots whose header and length are right. Their data is not read."""
        count = min(os.fstat(self.headers).st_size // HEADER.itemsize, self.slots or 1 << 62)
        headers = np.frombuffer(_read_all(self.headers, count * HEADER.itemsize), HEADER)
        ends = np.arange(len(headers)) * self.stride + self.bytes
        magic = headers["magic"].view("S8").reshape(-1) == MAGIC
        slots = np.flatnonzero(magic & (ends <= os.fstat(self.data).st_size))
        return slots, headers[slots]

    def is_sound(self, slot: int, header: np.ndarray) -> bool:
        """True if header and data belong together. Reads the data."""
        data = np.frombuffer(os.pread(self.data, self.bytes, slot * self.stride), np.uint8)
        if len(data) != self.bytes:
            return False
        head = np.array([header], HEADER)
        address = native.pointer(head, "struct ckdist_slab_header *")
        return bool(native.lib.ckdist_slab_check(address, native.pointer(data), self.bytes))

    def erase(self, slots: Iterable[int]) -> None:
        """Empties slots, and gives their space back if the file system can."""
        for slot in slots:
            os.pwrite(self.headers, bytes(HEADER.itemsize), slot * HEADER.itemsize)
            native.lib.ckdist_slab_punch(self.data, slot * self.stride, self.stride)


@dataclass
class CacheFolder:
    """A folder of a job on this host, which is open and locked until `close`."""

    path: pathlib.Path
    descriptor: int
    slabs: dict[str, SlabFiles] = field(default_factory=dict[str, SlabFiles])
    _open: list[int] = field(default_factory=list[int])

    @classmethod
    def open(cls, directory: str, key: str) -> "CacheFolder":
        """Opens DIR/<key>, and makes it if it is missing.

        Raises:
            ConfigError: It is not a folder of this user alone.
        """
        path = pathlib.Path(directory, key)
        with open_directory(directory) as base, _explained(path):
            with contextlib.suppress(FileExistsError):
                os.mkdir(key, 0o700, dir_fd=base)
            folder = cls(path, os.open(key, FOLDER_FLAGS, dir_fd=base))
        try:
            _check_owner(path, folder.descriptor)
        except ConfigError:
            folder.close()
            raise
        return folder

    def add_slab(self, kind: str, rank: int, ranks: int, size: int) -> SlabFiles:
        """Opens a rank's files of a kind, and locks them. `size`: bytes of one entry."""
        name = f"rank-{rank}-of-{ranks}.{kind}"
        headers, data = self.file(f"{name}.index"), self.file(name)
        try:
            fcntl.flock(headers, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise _refusal(self.path, error) from None
            raise ConfigError(
                f"--cache-disk: another job uses {self.path}; end it, or give this one another folder"
            ) from None
        self.slabs[kind] = SlabFiles(headers, data, size)
        return self.slabs[kind]

    def resize(self, kind: str, slots: int) -> None:
        """Sets the number of slots of a kind. Raises ConfigError if the files cannot be shortened."""
        with _explained(self.path):
            self.slabs[kind].resize(slots)

    def file(self, name: str) -> int:
        """Opens one of the folder's files, or makes it with mode 600. Raises ConfigError if it is not private."""
        path = self.path / name
        with _explained(path):
            file = os.open(name, FLAGS, 0o600, dir_fd=self.descriptor)
        self._open.append(file)
        _check_owner(path, file)
        return file

    def secret(self) -> bytes:
        """The random bytes that the names of tenants are made with. They are made at the first call."""
        file = self.file(SECRET)
        with _explained(self.path / SECRET):
            found = os.pread(file, SECRET_BYTES, 0)
            if len(found) != SECRET_BYTES:
                found = secrets.token_bytes(SECRET_BYTES)
                os.pwrite(file, found, 0)
                os.fsync(file)
        return found

    def describe(self, about: Mapping[str, Any]) -> None:
        """Writes the facts that `ckdist cache` shows. On a full disk they are missing."""
        with contextlib.suppress(OSError):
            temporary = f"{ABOUT}.{os.getpid()}"
            file = os.open(temporary, FLAGS | os.O_TRUNC, 0o600, dir_fd=self.descriptor)
            with os.fdopen(file, "w", encoding="utf-8") as text:
                json.dump({"format": FORMAT, **about}, text)
            os.replace(temporary, ABOUT, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def used_bytes(self) -> int:
        """Bytes of the file system that the slabs take."""
        return sum(os.fstat(f).st_blocks * 512 for slab in self.slabs.values() for f in (slab.headers, slab.data))

    def free_bytes(self) -> int:
        """Bytes of the file system that this user may still fill."""
        status = os.fstatvfs(self.descriptor)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        """Closes the files, which ends the lock."""
        for file in (*self._open, self.descriptor):
            with contextlib.suppress(OSError):
                os.close(file)
        self._open = []
        self.descriptor = -1


@contextlib.contextmanager
def open_directory(directory: str) -> Iterator[int]:
    """Opens the directory of all folders, and makes it if it is missing. Raises ConfigError if that is not possible."""
    with _explained(directory):
        pathlib.Path(directory).mkdir(0o700, parents=True, exist_ok=True)
        base = os.open(directory, FOLDER_FLAGS)
    try:
        yield base
    finally:
        os.close(base)


def check_directory(place: str) -> None:
    """Raises ConfigError if the directory in `place`, DIR[:SIZE], cannot be used."""
    with open_directory(folder_and_size(place, "--cache-disk")[0]):
        pass


def _read_all(file: int, size: int) -> bytes:
    parts = list[bytes]()
    while size > 0 and (part := os.pread(file, min(size, 1 << 24), sum(map(len, parts)))):
        parts.append(part)
        size -= len(part)
    data = b"".join(parts)
    return data[: len(data) // HEADER.itemsize * HEADER.itemsize]


def _check_owner(path: pathlib.Path, file: int) -> None:
    found = os.fstat(file)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise ConfigError(f"--cache-disk: {path} is neither a file nor a folder; remove it or choose another folder")
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"--cache-disk: {path} has mode {stat.S_IMODE(found.st_mode):o} and owner {found.st_uid}, and must be "
            f"closed to all but user {os.geteuid()}; remove it or choose another folder"
        )


def _refusal(path: pathlib.Path | str, error: OSError) -> ConfigError:
    is_link = error.errno in (errno.ELOOP, errno.ENOTDIR) and pathlib.Path(path).is_symlink()
    why = "it is a symbolic link" if is_link else error.strerror or str(error)
    return ConfigError(f"--cache-disk: {path} cannot be used: {why}; choose another folder")


@contextlib.contextmanager
def _explained(path: pathlib.Path | str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _refusal(path, error) from None
