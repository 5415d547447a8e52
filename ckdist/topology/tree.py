"""Reads small files of the kernel below a root folder.

A missing, unreadable or invalid file is read as empty and never raises an error.
"""

import os
import pathlib
import re
from collections.abc import Iterable

MAX_CPUS = 1 << 16  # larger than the kernel's limit of 8192; a list with larger numbers is invalid
MAX_TEXT = 1 << 22  # /proc/cpuinfo of 1000 CPUs has about 2 MB


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parses a kernel list such as "0-3,8"; returns ascending numbers. Raises ValueError for anything else."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip(), re.ASCII)
        if not match or int(match[2] or match[1]) >= MAX_CPUS:
            raise ValueError(f"{part[:20]!r} is not a range of CPUs")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(numbers))


def format_cpu_list(numbers: Iterable[int]) -> str:
    """Formats numbers as the shortest kernel list, such as "0-3,8"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)


class Tree:
    """Files below `root`. Paths are those of a running system, without the leading slash."""

    def __init__(self, root: str | os.PathLike[str] = "/"):
        self.root = pathlib.Path(root)

    def text(self, path: str) -> str:
        """The file's text without surrounding space; "" if it cannot be read."""
        try:
            with open(self.root / path, "rb") as file:
                return file.read(MAX_TEXT).decode(errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        """The whole number in a file; None if there is none."""
        text = self.text(path)
        return int(text) if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) else None

    def cpu_list(self, path: str) -> tuple[int, ...]:
        """The kernel list in a file; empty if it is invalid."""
        try:
            return parse_cpu_list(self.text(path))
        except ValueError:
            return ()

    def names(self, path: str) -> list[str]:
        """Names of a folder's entries, sorted."""
        try:
            return sorted(entry.name for entry in (self.root / path).iterdir())
        except OSError:
            return []

    def numbered(self, path: str, prefix: str) -> list[int]:
        """The numbers N of entries `prefix`N in a folder, ascending."""
        matches = (re.fullmatch(re.escape(prefix) + r"(\d{1,6})", name, re.ASCII) for name in self.names(path))
        return sorted(int(match[1]) for match in matches if match)

    def keyed(self, path: str) -> dict[str, str]:
        """Parses a file of "key: value" or "key value" lines. The first of equal keys counts."""
        rows: dict[str, str] = {}
        for line in self.text(path).splitlines():
            key, _, value = line.partition(":") if ":" in line else line.partition(" ")
            rows.setdefault(key.strip(), value.strip())
        return rows


def kilobytes(text: str) -> int:
    """Bytes of a value such as "123 kB"; 0 if it is invalid."""
    match = re.match(r"\d{1,15}", text, re.ASCII)
    return int(match[0]) * 1024 if match else 0
