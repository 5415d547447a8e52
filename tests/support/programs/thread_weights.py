"""`thread_weights.py RANKS THREADS`: ranks as threads of one process compute with weights that are being packed, by
threads of their own and by steps, in their own memory and in one another's; every logit must be that of weights packed
before.

Built with -fsanitize=thread, the library then tells of every race for a slice.
"""

import pathlib
import sys
import tempfile

import numpy as np

from tests.support.checkpoints import write_model
from tests.support.thread_ranks import run_threads
from tests.support.two_states import BEFORE, LARGE, TYPES, logits

ranks, threads = int(sys.argv[1]), int(sys.argv[2])
with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    write_model(folder, LARGE, dtype=np.float32)
    for path in (folder, TYPES[0]):
        of = lambda until: run_threads(ranks, lambda world: logits(world, path, until, threads, settled=False))
        expected = of(BEFORE)[0][0]
        for _ in range(3):
            for until in (1.0, 0.5):
                for a, b in zip(expected, of(until)[0][0], strict=True):
                    if not np.array_equal(a, b):
                        sys.exit(
                            f"{path.name} with {ranks} ranks of {threads} threads, packed up to {until}, "
                            "has other logits"
                        )
        print(f"{path.name}: same bits")
