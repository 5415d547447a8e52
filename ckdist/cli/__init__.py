"""The commands of `ckdist`."""

import os

# ckdist has its own kernels. Idle threads of numpy's BLAS poll and would take the cores of the ranks. numpy reads the
# variable when it is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
