"""`mpirun -n N python -m tests.support.mpi_pytest WORDS...`: pytest on every rank.

Rank 0 prints as pytest does. What another rank says is shown where it fails, and a rank that fails ends the job: others
may wait for it.
"""

import contextlib
import io
import os
import sys

import pytest
from mpi4py import MPI

UNUSED = ("hypothesispytest", "xdist", "xdist.looponfail", "anyio")  # plugins that take a third of a rank's start
rank = MPI.COMM_WORLD.rank
said = io.StringIO()
with contextlib.redirect_stdout(said) if rank else contextlib.nullcontext():
    without = [f"-pno:{name}" for name in UNUSED]
    code = pytest.main(["-x", "-q", "--durations=3", *without, *sys.argv[1:]])
if code and rank:
    sys.stdout.write(f"rank {rank}:\n{said.getvalue()}")
if code:
    sys.stdout.flush()
    os._exit(int(code))
