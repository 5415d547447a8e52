"""`thread_ranks.py RANKS THREADS`: the replay against the interpreter with ranks as threads of one process.

Built with -fsanitize=thread, the library then tells of every race between ranks and between their threads.
"""

import sys

from tests.programs.replay import check
from tests.test_program import FAMILIES
from tests.thread_world import run_ranks_as_threads

ranks, threads = int(sys.argv[1]), int(sys.argv[2])
for family in FAMILIES:
    for chunk in (64, 16):
        worst = run_ranks_as_threads(ranks, lambda world: check(world, family, "auto", threads, chunk))[0]
        print(f"{family} {worst:.2e}")
        if worst > 5e-7:
            sys.exit(f"{family} with {ranks} ranks of {threads} threads differs by {worst}")
