"""The caches of a model without its weights."""

from ckdist.layout import SINGLE
from ckdist.mesh import Mesh
from ckdist.models.decoder import forward
from ckdist.models.spec import ModelSpec
from ckdist.program.cache import LayerCache
from ckdist.program.lower import ServingLowering
from ckdist.program.tracer import trace


def caches_of(spec: ModelSpec) -> list[LayerCache]:
    """Those of all layers on a single rank."""
    mesh = Mesh()
    program = trace(forward, spec, SINGLE, mesh)
    return list(ServingLowering(program, mesh, lambda name: 0, lambda name: 1, max_tokens=16).run().caches.values())
