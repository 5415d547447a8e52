"""Opens the files of a model. Some are local copies of files at a URL, which lack parts (see `remote_file`)."""

import io
import pathlib
from typing import BinaryIO, cast

from ckdist.errors import FetchError
from ckdist.regular_file import open_regular

SUFFIX = ".parts"
READ_AHEAD = 1 << 20  # bytes that a read from Python fetches


def parts_path(path: pathlib.Path) -> pathlib.Path:
    """Returns the path of the record next to a local copy."""
    return path.with_name(path.name + SUFFIX)


def has_parts(path: pathlib.Path) -> bool:
    """True if `path` is the local copy of a file at a URL.

    Raises:
        FetchError: The copy is outside the store, since a model's folder must not name URLs.
    """
    if not parts_path(path).exists():
        return False
    from ckdist.hub.remote_file import remote_folder

    if remote_folder().resolve() not in path.resolve().parents:
        raise FetchError(
            f"{parts_path(path)} marks {path.name} as incomplete, and it is not in {remote_folder()}: use the "
            "model's URL, or remove that file if the model is complete"
        )
    return True


def open_file(path: pathlib.Path) -> BinaryIO:
    """Opens `path` for reading bytes. Reads from a local copy fetch missing parts. Raises OSError as `open` does."""
    if not has_parts(path):
        return open_regular(path)
    from ckdist.hub.remote_file import FetchingFile

    return cast("BinaryIO", io.BufferedReader(FetchingFile(path), READ_AHEAD))
