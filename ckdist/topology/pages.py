"""Reads on which NUMA nodes, and in which kinds of pages, a rank's memory is."""

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckdist import native
from ckdist.topology.machine import this_machine

SAMPLES = 64  # sampled pages per block of memory


@dataclass(frozen=True)
class Pages:
    """The places of sampled pages."""

    here: int  # pages on the rank's own nodes
    elsewhere: int
    refused: str = ""  # reason if the kernel refused the query

    def __add__(self, other: "Pages") -> "Pages":
        return Pages(self.here + other.here, self.elsewhere + other.elsewhere, self.refused or other.refused)

    def __str__(self) -> str:
        return "unknown" if self.refused else f"{self.here} / {self.elsewhere}"


def is_bound(address: Any) -> bool:
    """True if memory that was allocated after `bind_memory` is bound. Many containers forbid that.

    True on a machine with one node. `address` is a native pointer.
    """
    return len(this_machine().nodes) < 2 or native.lib.ckdist_memory_policy(address) > 0


@dataclass(frozen=True)
class Huge:
    """Bytes of some memory in huge pages."""

    reserved: int  # in explicitly reserved huge pages
    transparent: int  # in transparent huge pages
    resident: int  # in pages of any size

    def __str__(self) -> str:
        share = lambda part: f"{100 * part / self.resident:.0f} %"
        words = [
            f"{share(part)} {name}"
            for part, name in ((self.reserved, "reserved"), (self.transparent, "transparent"))
            if part
        ]
        return (", ".join(words) or "none") if self.resident else "unknown"


def huge_pages(blocks: Iterable[tuple[Any, int]], smaps: str = "/proc/self/smaps") -> Huge:
    """Reads how much of some blocks (native pointer, bytes) of this process is in huge pages.

    A block that is part of a mapping counts for its fraction of the mapping.
    """
    blocks = [(native.address(address), size) for address, size in blocks]
    reserved = transparent = resident = inside = 0.0  # inside: fraction of a mapping that is in the blocks
    try:
        with open(smaps) as file:
            for line in file:
                name, _, rest = line.partition(" ")
                if not name.endswith(":"):
                    first, last = (int(end, 16) for end in name.split("-"))
                    inside = sum(max(0, min(last, begin + size) - max(first, begin)) for begin, size in blocks) / max(
                        1, last - first
                    )
                elif inside and name in (
                    "Rss:",
                    "AnonHugePages:",
                    "ShmemPmdMapped:",
                    "FilePmdMapped:",
                    "Private_Hugetlb:",
                    "Shared_Hugetlb:",
                ):
                    held = int(rest.split()[0]) * 1024 * inside
                    reserved += held * name.endswith("Hugetlb:")
                    resident += held * (name == "Rss:" or name.endswith("Hugetlb:"))
                    transparent += held * (name != "Rss:" and not name.endswith("Hugetlb:"))
    except (OSError, ValueError):
        return Huge(0, 0, 0)
    return Huge(round(reserved), round(transparent), round(resident))


def sample_pages(address: Any, size: int, nodes: tuple[int, ...], touch: bool = False, samples: int = SAMPLES) -> Pages:
    """Samples the nodes of pages, evenly over `size` bytes at `address`, a native pointer.

    `touch`: allocate sampled pages that do not exist yet.
    """
    if not size:
        return Pages(0, 0)
    found = np.zeros(samples, np.int32)
    status = native.lib.ckdist_page_nodes(address, size, samples, touch, native.pointer(found, "int32_t *"))
    if status < 0:
        reason = os.strerror(-status).lower()
        if -status in (errno.EPERM, errno.ENOSYS):
            reason += "; in a container move_pages needs --cap-add SYS_NICE"
        return Pages(0, 0, reason)
    known = [node for node in found.tolist() if node >= 0]
    here = sum(node in nodes for node in known)
    return Pages(here, len(known) - here)
