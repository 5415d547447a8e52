"""Models at a URL: a GGUF file, all parts of a split one, or a folder with config.json and safetensors files.

Small files are fetched whole. A large file becomes a sparse local file, into which each host fetches the ranges that
its ranks need (`hub/remote_file.py`).
"""

import contextlib
import hashlib
import json
import pathlib
import re
from typing import Any

from ckdist.errors import ConfigError, FetchError
from ckdist.hub.folder_files import BESIDE, CONFIG, INDEX_FILE, SINGLE_FILE
from ckdist.hub.model_url import NotThereError, fragment_of, scheme_of, shown
from ckdist.hub.remote_file import fetch_ranges, make_remote, remote_folder

MAX_SMALL_BYTES = 256 << 20  # largest file that is fetched whole
MAX_FILES = 1 << 12
SPLIT = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")


def remote_model(url: str) -> str:
    """Returns the local path of the model at a URL: a file for a GGUF file, else a folder.

    Raises:
        ConfigError: The URL is of an unknown kind.
        FetchError: A file is missing or cannot be read.
    """
    scheme_of(url)
    fragment = fragment_of(url)
    place = url.partition("#")[0]
    address, question, query = place.partition("?")
    folder = remote_folder() / hashlib.sha256(place.encode()).hexdigest()[:32]
    if not address.endswith(".gguf"):
        if fragment.digests:
            raise ConfigError(f"{shown(url)} is a folder of many files: #sha256= is for GGUF files")
        return str(_folder(address.rstrip("/"), question + query + url[len(place) :], folder))
    base, _, name = address.rpartition("/")
    split = SPLIT.fullmatch(name)
    names = [name]
    if split and 0 < int(split["count"]) <= MAX_FILES:
        names = [f"{split['stem']}-{i + 1:05}-of-{split['count']}.gguf" for i in range(int(split["count"]))]
    if fragment.digests and len(fragment.digests) != len(names):
        raise ConfigError(f"{shown(url)} has {len(names)} files, and #sha256= has {len(fragment.digests)} numbers")
    for i, part in enumerate(names):
        own = f"#sha256={fragment.digests[i]}" if fragment.digests else url[len(place) :]
        make_remote(f"{base}/{part}{question}{query}{own}", folder / _checked(part))
    return str(folder / name)


def _folder(base: str, query: str, folder: pathlib.Path) -> pathlib.Path:
    """Creates the local folder of a model folder at a URL."""
    _whole(f"{base}/{CONFIG}{query}", folder / CONFIG)
    for name in BESIDE:
        with contextlib.suppress(NotThereError):
            _whole(f"{base}/{name}{query}", folder / name)
    names = [SINGLE_FILE]
    if (folder / INDEX_FILE).exists():
        try:
            index = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
            names = sorted(set(index.values()))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FetchError(f"{shown(base)}/{INDEX_FILE} is damaged: {error}") from None
    if len(names) > MAX_FILES:
        raise FetchError(f"{shown(base)}/{INDEX_FILE} names {len(names)} files, more than the {MAX_FILES} allowed")
    for name in names:
        make_remote(f"{base}/{_checked(name)}{query}", folder / name)
    return folder


def _whole(url: str, path: pathlib.Path) -> None:
    """Fetches a small file whole."""
    make_remote(url, path)
    if (size := path.stat().st_size) > MAX_SMALL_BYTES:
        raise FetchError(f"{shown(url)} has {size} bytes, more than the {MAX_SMALL_BYTES} allowed for such a file")
    fetch_ranges(path, [(0, size)])


def _checked(name: Any) -> str:
    """Returns the name of a file in a folder. Raises ConfigError if it is unsafe, such as a path out of the folder."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]{1,200}", name) or name.startswith("."):
        raise ConfigError(
            f"{name!r:.80} is not the name of a model's file: only letters, digits, '.', '_', '+' and '-' are allowed"
        )
    return name
