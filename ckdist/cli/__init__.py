"""The commands of `ckdist`. Its own kernels multiply: numpy's threads, which poll while they have nothing to do, stay
off the cores of the ranks.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy reads it when it is imported
