"""Small files of the kernel under a root folder.

What is missing, unreadable or garbage reads as nothing, never as an error.
"""

import os
import pathlib
import re
from collections.abc import Iterable

MAX_CPUS = 1 << 16  # far beyond the kernel's 8192: a list with more is not one
MAX_TEXT = 1 << 22  # /proc/cpuinfo of a thousand CPUs is some 2 MB


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The numbers of a kernel list such as "0-3,8", ascending. ValueError for anything else."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip(), re.ASCII)
        if not match or int(match[2] or match[1]) >= MAX_CPUS:
            raise ValueError(f"{part[:20]!r} is not a range of CPUs")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(numbers))


def format_cpu_list(numbers: Iterable[int]) -> str:
    """The shortest kernel list of some numbers: "0-3,8"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)


class Tree:
    """Files below `root`; paths are given as they are on a running system, without the leading slash."""

    def __init__(self, root: str | os.PathLike[str] = "/"):
        self.root = pathlib.Path(root)

    def text(self, path: str) -> str:
        """The file's text without surrounding space; "" where there is none."""
        try:
            with open(self.root / path, "rb") as file:
                return file.read(MAX_TEXT).decode(errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        """The whole number that the file holds."""
        text = self.text(path)
        return int(text) if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) else None

    def cpu_list(self, path: str) -> tuple[int, ...]:
        """The kernel list that the file holds; empty where it is garbage."""
        try:
            return parse_cpu_list(self.text(path))
        except ValueError:
            return ()

    def names(self, path: str) -> list[str]:
        """What a folder holds, sorted."""
        try:
            return sorted(entry.name for entry in (self.root / path).iterdir())
        except OSError:
            return []

    def numbered(self, path: str, prefix: str) -> list[int]:
        """The numbers N of a folder's entries `prefix`N, ascending."""
        matches = (re.fullmatch(re.escape(prefix) + r"(\d{1,6})", name, re.ASCII) for name in self.names(path))
        return sorted(int(match[1]) for match in matches if match)

    def keyed(self, path: str) -> dict[str, str]:
        """A file of "key: value" or "key value" lines; the first of equal keys."""
        rows: dict[str, str] = {}
        for line in self.text(path).splitlines():
            key, _, value = line.partition(":") if ":" in line else line.partition(" ")
            rows.setdefault(key.strip(), value.strip())
        return rows


def kilobytes(text: str) -> int:
    """Bytes of a "123 kB" value; 0 where it is none."""
    match = re.match(r"\d{1,15}", text, re.ASCII)
    return int(match[0]) * 1024 if match else 0
