"""Finds the files that train_file names: files, patterns and folders."""

import glob
import re
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

from ckdist.errors import ConfigError
from ckdist.train.data.data_report import counted

LIBRARY = "{stdlib}"
LINES = (".jsonl", ".ndjson", ".jsonlines")
TABLES = (".csv", ".tsv", ".parquet")
RECORDS = (*LINES, ".json", *TABLES)
TEXTS = (".txt", ".md", ".rst")
# Files of a data set's folder that are not training data: other splits, and descriptions of the data set.
OTHER_SPLIT = re.compile(r"(^|[-_.])(test|dev|val|valid|validation|eval|evaluation)([-_.]|$)", re.IGNORECASE)
DESCRIPTIONS = ("README.md", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
Warn = Callable[[str], None]


def find_files(patterns: Iterable[str], warn: Warn = lambda _: None) -> list[Path]:
    """Returns the files that names, patterns and folders match, each once, in order.

    `warn` is called with a message for a file that two of them match, and for files of a folder that are left out.
    Raises ConfigError if one of them matches no file.
    """
    found: dict[Path, Path] = {}  # by resolved path
    for pattern in patterns:
        for match in find_source(pattern, warn):
            if (first := found.setdefault(match.resolve(), match)) is not match:
                warn(f"{match} is named twice{'' if first == match else f' (as {first} too)'}, and is read once")
    return list(found.values())


def find_source(pattern: str, warn: Warn = lambda _: None) -> list[Path]:
    """The files that one name, pattern or folder matches. Errors and `warn` as for `find_files`."""
    written = pattern.replace(LIBRARY, glob.escape(sysconfig.get_paths()["stdlib"]))
    path = Path(written).expanduser()
    if path.is_dir():
        return _of_folder(path, warn)
    # Path.glob takes no pattern that begins at the root.
    names = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
    matches = [Path(name) for name in names if Path(name).is_file()]
    if not matches:
        raise ConfigError(
            f"no data file is at {pattern!r} (from {Path.cwd()}): give names or patterns as data/*.txt, or a folder"
        )
    return matches


def _of_folder(folder: Path, warn: Warn) -> list[Path]:
    """The training data of a folder: its records, or its texts if it has no records."""
    every = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    visible = [path for path in every if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    for kinds in (RECORDS, TEXTS):
        data = [path for path in visible if path.suffix.lower() in kinds and path.name not in DESCRIPTIONS]
        chosen = [path for path in data if not OTHER_SPLIT.search(path.stem)]
        if chosen:
            if splits := [path for path in data if path not in chosen]:
                warn(f"{folder}: left out as another split: {counted(len(splits), 'file')}, as {splits[0].name}")
            if rest := [path for path in visible if path not in data]:
                warn(f"{folder}: left out as another kind: {counted(len(rest), 'file')}, as {rest[0].name}")
            return chosen
    raise ConfigError(f"{folder} has no file to train on: {', '.join((*RECORDS, *TEXTS))} are read from a folder")
