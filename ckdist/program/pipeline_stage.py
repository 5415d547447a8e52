"""One of a model's pipeline stages."""

from dataclasses import dataclass

from ckdist.layout import Range
from ckdist.mesh import Mesh
from ckdist.program.program import Program


@dataclass(frozen=True)
class Stage:
    """Stage `number` (from 0) of `count`, with layers [begin, end) of a model.

    The first stage also has the embedding, the last one the head.
    """

    number: int
    count: int
    layers: Range

    @property
    def first(self) -> bool:
        """True if this is the first stage."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """True if this is the last stage."""
        return self.number == self.count - 1

    def program(self, whole: Program, mesh: Mesh) -> Program:
        """This stage's part of the program `whole`, or `whole` itself if there is one stage.

        `mesh` is that of the stage's ranks. Raises LayoutError if the program lacks these boundaries.
        """
        if self.count == 1:
            return whole
        from ckdist.program.stage_slice import stage_program

        return stage_program(self, whole, mesh)
