"""Files of small results that are kept between starts: in the user's cache, else until the next boot."""

import contextlib
import json
import os
import pathlib
import stat
import tempfile
from typing import Any

from ckdist.comm.thresholds import cache_folder
from ckdist.regular_file import replace_text


def cache_path(name: str, writing: bool = False) -> pathlib.Path:
    """Returns the file of a result, such as bandwidth/KEY.json.

    If the home cannot be written, the file is in the temporary folder, so that not every start measures again. Raises
    OSError if neither is usable.
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
    """Returns this user's own temporary folder. Raises OSError if another user made it or can write it."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = pathlib.Path(base) / f"ckdist-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} is not this user's alone: remove it")
    return folder


def _can_write(folder: pathlib.Path) -> bool:
    """True if a folder can be written, or created."""
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def read_kept(name: str) -> Any:
    """Returns the JSON value of a kept file; None if there is none."""
    try:
        with open(cache_path(name), encoding="utf-8") as file:
            return json.loads(file.read(1 << 20))
    except (OSError, ValueError, RecursionError):
        return None


def write_kept(name: str, value: object) -> None:
    """Keeps a value as JSON. A cache that cannot be written is ignored."""
    with contextlib.suppress(OSError):
        path = cache_path(name, writing=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(value))
