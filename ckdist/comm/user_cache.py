"""Where small results are kept between starts: the user's cache, or a folder that lasts until the next boot."""

import os
import pathlib
import stat
import tempfile

from ckdist.comm.thresholds import cache_folder


def cache_path(name: str, writing: bool = False) -> pathlib.Path:
    """The file of a result, such as bandwidth/KEY.json.

    A home that cannot be written has it in the temporary folder, so that not every start measures again. OSError if
    neither can be had.
    """
    try:
        home = cache_folder()
    except RuntimeError:  # this user has none
        return temporary_cache() / name
    if _can_write(home):
        return home / name
    own = temporary_cache() / name
    return own if writing or own.exists() or not (home / name).exists() else home / name


def temporary_cache() -> pathlib.Path:
    """A folder of the temporary folder that is this user's alone. OSError if somebody else made it, or may write it."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = pathlib.Path(base) / f"ckdist-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} is not this user's alone: remove it")
    return folder


def _can_write(folder: pathlib.Path) -> bool:
    """Whether a folder can be written, or made."""
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
