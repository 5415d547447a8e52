"""Where a rank's pages are to be, and where they really are."""

import errno
import os
from dataclasses import dataclass

from ckdist import native
from ckdist.topology.placement import Placement

SAMPLES = 64  # pages asked about in one block of memory


@dataclass(frozen=True)
class Pages:
    """A sample of pages. `here`: on the rank's own nodes; `refused`: why the kernel would not tell, or ""."""

    here: int
    elsewhere: int
    refused: str = ""

    def __add__(self, other: "Pages") -> "Pages":
        return Pages(self.here + other.here, self.elsewhere + other.elsewhere, self.refused or other.refused)

    def __str__(self) -> str:
        return "unknown" if self.refused else f"{self.here} / {self.elsewhere}"


def bind_memory(placement: Placement) -> None:
    """Weights, cache and buffers that are made from now on lie on the placement's nodes."""
    native.check(native.lib.ckdist_place_memory(list(placement.memory), len(placement.memory), placement.sharers))


def sample_pages(address, size: int, nodes: tuple[int, ...], touch: bool = False, samples: int = SAMPLES) -> Pages:
    """Asks the kernel where pages spread over `size` bytes at `address` lie. `touch`: those that do not exist yet are made."""
    if not size:
        return Pages(0, 0)
    found = native.ffi.new("int32_t[]", samples)
    status = native.lib.ckdist_page_nodes(address, size, samples, touch, found)
    if status < 0:
        reason = os.strerror(-status).lower()
        if -status in (errno.EPERM, errno.ENOSYS):
            reason += "; in a container move_pages needs --cap-add SYS_NICE"
        return Pages(0, 0, reason)
    known = [node for node in found if node >= 0]
    here = sum(node in nodes for node in known)
    return Pages(here, len(known) - here)
