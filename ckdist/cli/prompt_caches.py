"""`ckdist cache list|verify|prune DIR`: the prompts that --cache-disk has kept, without a model."""

import contextlib
import json
import pathlib
import shutil
import sys
import time
from typing import Any

from ckdist.config.commands import CacheCommand
from ckdist.engine.cache_folder import ABOUT, FORMAT, CacheFolder, SlabFiles
from ckdist.engine.disk_cache import found_entries
from ckdist.engine.disk_index import DiskIndex
from ckdist.errors import ConfigError
from ckdist.layouts.memory_sizes import gigabytes
from ckdist.program.executable import SLABS
from ckdist.terminal import is_terminal, print_table

HEAD = ("folder", "model", "ranks", "tokens", "size", "last written", "note")
ABOUT_BYTES = 1 << 20
MOST_ENTRY_BYTES = 1 << 40
DAY = 86400.0


class StoredCache:
    """One folder of a job, locked until `close` unless a job uses it.

    Attributes:
        slabs: The files of this host's ranks, by name. Empty if a job uses them.
        note: "in use", or empty.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path, self.about, self.note = path, _about(path), ""
        self.slabs: dict[str, SlabFiles] = {}
        self._folder = CacheFolder.open(str(path.parent), path.name)
        try:
            for rank, sizes in enumerate(self.about["bytes"]):
                for kind in SLABS:
                    name = f"rank-{rank}-of-{self.about['ranks']}.{kind}"
                    if (path / name).is_file():
                        self.slabs[name] = self._folder.add_slab(kind, rank, self.about["ranks"], sizes[kind])
        except ConfigError as error:
            if "another job" not in str(error):
                raise
            self.slabs, self.note = {}, "in use"
            self._folder.close()
        self.written = max((file.stat().st_mtime for file in path.glob("*.index")), default=path.stat().st_mtime)

    @property
    def bytes(self) -> int:
        """Bytes that its files take on this host."""
        return sum(file.lstat().st_blocks * 512 for file in self.path.iterdir())

    @property
    def tokens(self) -> int:
        """Tokens that are stored."""
        counts = [len(slab.entries()[0]) for name, slab in self.slabs.items() if name.endswith(".blocks")]
        return min(counts, default=0) * self.about["block_tokens"]

    def shrink(self, size: int) -> None:
        """Removes the entries that were stored first, children before parents, until its files take `size` bytes."""
        excess, kinds = self.bytes - size, len({name.rpartition(".")[2] for name in self.slabs})
        for kind in SLABS:
            slabs = [slab for name, slab in self.slabs.items() if name.endswith(f".{kind}")]
            if not slabs:
                continue
            slots, headers = slabs[0].entries()
            index, erased = DiskIndex(len(slots)), list[int]()
            found = found_entries(slots, headers["entry"])
            index.restore(found if kind == "blocks" else [entry._replace(depth=0, parent=b"") for entry in found])
            kept = index.slots
            erased += [slot for slot in slots.tolist() if slot not in kept]  # their parents are missing
            each = sum(slab.bytes_on_disk for slab in slabs)
            while len(erased) * each * kinds < excess and (slot := index.evict()) is not None:
                erased.append(slot)
            for slab in slabs:
                slab.erase(erased)

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path)

    def close(self) -> None:
        """Ends the lock."""
        self._folder.close()


def run(command: CacheCommand) -> int:
    """Runs one action. Returns 1 if `verify` has found damage, else 0."""
    directory = pathlib.Path(command.directory or "")
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a folder: give the one of --cache-disk")
    with contextlib.ExitStack() as opened:
        caches = list[StoredCache]()
        for path in sorted(directory.iterdir()):
            if (path / ABOUT).is_file() and not path.is_symlink():
                caches.append(StoredCache(path))
                opened.callback(caches[-1].close)
        if command.action == "verify":
            return verify(caches)
        if command.action == "prune":
            caches = prune(caches, command.size, command.days)
        show(caches)
    return 0


def show(caches: list[StoredCache]) -> None:
    """Prints a table of the folders."""
    rows = [
        (
            cache.path.name,
            str(cache.about["model"]),
            str(cache.about["ranks"]),
            "" if cache.note else str(cache.tokens),
            gigabytes(cache.bytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(cache.written)),
            cache.note,
        )
        for cache in caches
    ]
    if is_terminal(sys.stdout):
        print_table(HEAD, rows, right=("ranks", "tokens", "size"))
        return
    for row in (HEAD, *rows):
        print("\t".join(row))


def verify(caches: list[StoredCache]) -> int:
    """Reads every entry and compares its checksum. Returns 1 if an entry is damaged, else 0."""
    damaged = 0
    for cache in caches:
        if cache.note:
            print(f"{cache.path}: a job uses it, and finds damage itself")
        for name, slab in cache.slabs.items():
            slots, headers = slab.entries()
            bad = [
                slot for slot, header in zip(slots.tolist(), headers, strict=True) if not slab.is_sound(slot, header)
            ]
            damaged += len(bad)
            print(f"{cache.path / name}: {len(slots) - len(bad)} entries are sound, {len(bad)} are damaged")
    return int(damaged > 0)


def prune(caches: list[StoredCache], size: int | None, days: float | None) -> list[StoredCache]:
    """Removes folders that are too old, then the oldest folders and entries, until `size` bytes stay.

    Folders in use stay as they are.

    Returns:
        The folders that stay.
    """
    kept = list[StoredCache]()
    excess = 0 if size is None else sum(cache.bytes for cache in caches) - size
    for cache in sorted(caches, key=lambda cache: cache.written):
        taken = cache.bytes
        is_old = days is not None and cache.written < time.time() - days * DAY
        if cache.note:
            kept.append(cache)
        elif is_old or taken <= excess:
            cache.remove()
            excess -= taken
        else:
            if excess > 0:
                cache.shrink(taken - excess)
                excess -= taken - cache.bytes
            kept.append(cache)
    return kept


def _about(path: pathlib.Path) -> dict[str, Any]:
    """The facts about a folder. Raises ConfigError if it is not a cache of this format."""
    try:
        with (path / ABOUT).open(encoding="utf-8") as file:
            about = json.loads(file.read(ABOUT_BYTES))
        sizes = [each[kind] for each in about["bytes"] for kind in SLABS]
        numbers = (about["block_tokens"], *sizes)
        is_sound = all(type(n) is int and 0 <= n <= MOST_ENTRY_BYTES for n in numbers) and "model" in about
        if is_sound and about["format"] == FORMAT and len(about["bytes"]) == about["ranks"]:
            return about
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ConfigError(f"{path} is not a prompt cache of format {FORMAT}: remove it")
