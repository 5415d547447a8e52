"""`thread_models.py RANKS`: ranks as threads of one process load, run and unload two models, and copy blocks while
steps run. For ThreadSanitizer.
"""

import sys
import tempfile

from tests.support.programs import copied_blocks, two_models
from tests.support.thread_ranks import run_threads

ranks = int(sys.argv[1])
run_threads(ranks, two_models.job)
with tempfile.TemporaryDirectory() as folder:
    run_threads(ranks, lambda world: copied_blocks.job(world, folder))
