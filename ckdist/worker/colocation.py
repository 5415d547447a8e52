"""The place of a model among the models of a rank."""

from dataclasses import dataclass

from ckdist.comm.communicator import Communicator
from ckdist.program.native_worker import NativeWorker


@dataclass(frozen=True)
class Colocation:
    """A model's place among the models of a rank."""

    worker: NativeWorker
    communicator: Communicator  # all ranks; the model's own
    model: int  # its number, the same on every rank
