"""The machine below: its CPUs, memory and devices as the kernel describes them, and where each rank of a host runs.

Everything is read under a root folder ("/" unless told otherwise), so a recorded tree of another machine reads the same
way. Nothing here runs a model; memory is bound by the native arenas, which are told where by `bind_memory`.
"""

from ckdist.topology.machine import Machine, read_machine, this_machine
from ckdist.topology.pages import Huge, Pages, bind_memory, huge_pages, is_bound, sample_pages
from ckdist.topology.placement import Placement, default_threads, place

__all__ = [
    "Huge",
    "Machine",
    "Pages",
    "Placement",
    "bind_memory",
    "default_threads",
    "huge_pages",
    "is_bound",
    "place",
    "read_machine",
    "sample_pages",
    "this_machine",
]
