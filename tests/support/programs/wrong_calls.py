"""`wrong_calls.py TRANSPORT` under mpirun: the last rank calls something else than the others, which all ranks must
be told, in every way there is.
"""

import re
import sys

import numpy as np

from ckdist.comm.communicator import open_communicator
from ckdist.comm.mpi_world import MpiWorld
from ckdist.errors import CommError
from tests.support.collective_jobs import WRONG_CALLS

world, kept = MpiWorld(), []
for wrong, calls in WRONG_CALLS.items():
    c = open_communicator(world, sys.argv[1], timeout=2 if wrong == "root" else 20)
    try:
        calls[world.rank == world.size - 1](c, np.zeros(1000, np.float32))
        c.barrier()
    except CommError as error:
        assert re.search("called another collective|bytes where|did not answer within 2 s", str(error)), error
        sys.stdout.write(f"{wrong}: told\n")
    else:
        sys.exit(f"{wrong}: not noticed")
    world.gather(None)
    kept.append(c)  # MPI may still write where messages were awaited
for c in kept:
    c.close()
world.close()
