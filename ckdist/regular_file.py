"""Opens files from strangers: opening a FIFO would wait for its writer, and reading a device would never end.

Writes files that others may read meanwhile, and files that survive a loss of power.
"""

import contextlib
import errno
import hashlib
import os
import pathlib
import stat
from io import BufferedReader

KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: str | os.PathLike[str], pipes: bool = False) -> BufferedReader:
    """Opens a file for reading bytes, without waiting.

    With `pipes` a pipe is accepted too, such as a shell's `<(command)`; one without a writer is empty.

    Raises:
        OSError: The path cannot be opened, or is no regular file; `strerror` says so.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG and not (pipes and kind == stat.S_IFIFO):
            raise OSError(errno.EINVAL, f"it is {KINDS.get(kind, 'something else')}, not a regular file", str(path))
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Raises OSError unless `path` is absent or a regular file: a rename would replace a device such as /dev/null."""
    with contextlib.suppress(FileNotFoundError):
        kind = stat.S_IFMT(pathlib.Path(path).stat().st_mode)
        if kind != stat.S_IFREG:
            raise OSError(errno.EINVAL, f"it is {KINDS.get(kind, 'something else')}, not a regular file", str(path))


def replace_text(path: str | os.PathLike[str], text: str, mode: int = 0o666) -> None:
    """Writes a file under another name, then replaces `path`: readers see the old text or the new. Raises OSError."""
    temporary = pathlib.Path(f"{os.fspath(path)}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_synced(path: str | os.PathLike[str], data: bytes) -> str:
    """Writes and syncs a file, and returns the hex SHA-256 of its bytes. Raises OSError."""
    with open(path, "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def sync(path: str | os.PathLike[str]) -> None:
    """Makes a file's bytes, or the names in a folder, survive a loss of power. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """The bytes of a regular file of at most `most_bytes`, checked before reading. Raises OSError as above."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(most_bytes + 1) if size <= most_bytes else b""
        if max(size, len(data)) > most_bytes:
            raise OSError(
                errno.EFBIG, f"it has {max(size, len(data))} bytes, more than the {most_bytes} allowed", str(path)
            )
        return data
