"""A NativeExecutable of a model, from the model's numbers and its weights."""

from ckdist.mesh import Mesh
from ckdist.train.loss_program import lower_model
from ckdist.train.native_executable import NativeExecutable
from ckdist.train.ranks import TrainingRanks


def executable(
    spec, max_tokens, load, dtype="float32", pool=None, communicator=None, stored=None, tp=1, **more
) -> NativeExecutable:
    """`load(name)`: a whole weight; `communicator`: of all ranks; `more`: as `lower_model`."""
    mesh = Mesh.of_job(communicator.size, communicator.rank, tp=tp) if communicator else Mesh.of_job(1, 0)
    program = lower_model(spec, max_tokens, dtype, mesh, stored=frozenset(stored or ()), **more)
    return NativeExecutable(program, load, pool, TrainingRanks.split(mesh, communicator), stored)
