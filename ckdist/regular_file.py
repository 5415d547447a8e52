"""Opens files from strangers: opening a FIFO would wait for its writer, and reading a device would never end."""

import errno
import os
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
