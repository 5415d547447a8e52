"""The mesh: the ranks of a job as a grid with named axes, and a rank's coordinates on it.

A job's axes are `dp` (replicas that share a batch), `sp` (ranks that divide the tokens of each sequence), `pp`
(pipeline stages), `ep` (experts) and `tp` (tensors), outermost first. The ranks of a `tp` group are consecutive, so
they are usually on one host. The mesh itself does not depend on hosts: groups may span them in any way.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckdist.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    from ckdist.comm.communicator import Communicator

AXES: tuple[str, ...] = ("dp", "sp", "pp", "ep", "tp")  # outermost first
WHOLE = "tp"  # the axis over all ranks
HOST, LOCAL = "host", "local"  # the axes over hosts, and over the ranks of a host


@dataclass(frozen=True)
class Mesh:
    """The ranks as a row-major grid.

    A grid without an axis `tp` accepts that name too: it is the axis over all ranks, in order.

    Attributes:
        axes: Axis name -> number of ranks along it.
        rank: This process's index.
        shares: Each rank's relative part of everything that is sharded. (): all parts are equal.
    """

    axes: Mapping[str, int] = field(default_factory=lambda: {"tp": 1})
    rank: int = 0
    shares: tuple[int, ...] = ()

    @staticmethod
    def of_job(ranks: int, rank: int, dp: int = 0, sp: int = 1, pp: int = 1, ep: int = 1, tp: int = 1) -> "Mesh":
        """The mesh of a job of `ranks` ranks. dp 0: the largest number of replicas.

        Raises ConfigError if the product of the axes is not the number of ranks.
        """
        others = sp * pp * ep * tp
        sizes = dict(zip(AXES, (dp or max(1, ranks // others), sp, pp, ep, tp), strict=True))
        needed = math.prod(sizes.values())
        if needed == ranks:
            return Mesh(sizes, rank)
        shown = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        remedy = f"start {needed} ranks" if dp else f"start a multiple of {others} ranks"
        raise ConfigError(
            f"{ranks} ranks cannot be a mesh of {shown}, which has {needed}: {remedy}, or change the axes"
        )

    def parts(self, axis: str) -> tuple[str, ...]:
        """The axes that the name `axis` includes: itself, or all. Raises LayoutError if the mesh lacks the axis."""
        if axis in self.axes:
            return (axis,)
        if axis == WHOLE:
            return tuple(self.axes)
        raise LayoutError(f"mesh has no axis {axis!r}; it has {', '.join(self.axes)}")

    def size(self, axis: str) -> int:
        """Ranks along `axis`."""
        return math.prod(self.axes[name] for name in self.parts(axis))

    def index(self, axis: str) -> int:
        """This rank's coordinate along `axis`."""
        if self.parts(axis) != (axis,):
            return self.rank
        return self.rank // self._stride(axis) % self.axes[axis]

    def _stride(self, axis: str) -> int:
        """The difference of ranks between neighbours along an axis."""
        names = list(self.axes)
        return math.prod(self.axes[name] for name in names[names.index(axis) + 1 :])

    def without(self, axis: str | None, taken: str) -> str | None:
        """`axis` without its part `taken`: one axis, or None. Raises LayoutError if more than one axis is left."""
        rest = [name for name in self.parts(axis) if name != taken] if axis else []
        if len(rest) > 1:
            raise LayoutError(f"{axis} without {taken} is {' and '.join(rest)}: an array is sharded over one axis")
        return rest[0] if rest else None

    def along(self, axis: str) -> list["Mesh"]:
        """The meshes of all ranks that differ from this one at most along `axis`, in order."""
        first = self.rank - self.index(axis) * self._stride(axis)
        return [replace(self, rank=first + i * self._stride(axis)) for i in range(self.axes[axis])]

    def shares_along(self, axis: str) -> tuple[int, ...]:
        """The relative parts of the coordinates along `axis`, each the sum of its ranks' parts."""
        if not self.shares or self.parts(axis) != (axis,):
            return self.shares or (1,) * self.size(axis)
        sums = [0] * self.axes[axis]
        for rank, share in enumerate(self.shares):
            sums[rank // self._stride(axis) % self.axes[axis]] += share
        return tuple(sums)

    def group(self, *axes: str) -> list[int]:
        """The ranks that differ from this one at most along `axes`, in order. This rank is among them."""
        ranks, stride = [0], 1
        for name, size in reversed(list(self.axes.items())):
            places = range(size) if name in axes else [self.rank // stride % size]
            ranks = [i * stride + rank for i in places for rank in ranks]
            stride *= size
        return ranks

    def split(self, communicator: "Communicator", *axes: str) -> "Communicator | None":
        """Splits the communicator of all ranks into those of the groups along `axes`. A collective call.

        Returns:
            The communicator of `group(*axes)`; `communicator` itself if that has all ranks, None if it has only one.

        Raises:
            LayoutError: `communicator` has another number of ranks than the mesh.
        """
        group, ranks = self.group(*axes), math.prod(self.axes.values())
        if communicator.size != ranks:
            raise LayoutError(f"the mesh has {ranks} ranks ({self}), and its communicator has {communicator.size}")
        if len(group) in (1, ranks):
            return communicator if len(group) > 1 else None
        return communicator.split(color=group[0], key=self.rank)

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.axes.items() if size > 1) or "one rank"
