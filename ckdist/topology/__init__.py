"""The machine: its CPUs, memory and devices as the kernel describes them, and the placement of a host's ranks.

All files are read below a root folder, by default "/", so a recorded tree of another machine can be read in the same
way. Nothing here runs a model. The native arenas bind memory, to the nodes that `bind_memory` sets.
"""

from ckdist.topology.machine import Machine, read_machine, this_machine
from ckdist.topology.placement import Placement, bind_memory, default_threads, place

__all__ = [
    "Machine",
    "Placement",
    "bind_memory",
    "default_threads",
    "place",
    "read_machine",
    "this_machine",
]
