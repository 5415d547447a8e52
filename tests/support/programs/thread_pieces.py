"""`thread_pieces.py RANKS THREADS`: experts, linear and latent attention in the replay against the interpreter with
ranks as threads of one process, on one host and over hosts, where rows go to the hosts that have their experts.

Built with -fsanitize=thread, the library then tells of every race between ranks and between their threads.
"""

import sys

from tests.support.programs.replay import check
from tests.support.specs import LINEAR, PIECES
from tests.support.thread_ranks import run_threads

ranks, threads = int(sys.argv[1]), int(sys.argv[2])
hosts = {2: "ab", 4: "aabb", 6: "aabbcc"}[ranks]
mixtures = [name for name in PIECES if "ffn" in PIECES[name].get("layer", {})]
cases = [(name, ranks, "tensor") for name in (*mixtures, *LINEAR)] + [(name, hosts, "expert") for name in mixtures]
for family, where, experts in cases:
    worst = run_threads(where, lambda world: check(world, family, "auto", threads, 64, experts))[0]
    print(f"{family} {where} {experts} {worst:.2e}", flush=True)
    if worst > 5e-7:
        sys.exit(f"{family} with {ranks} ranks of {threads} threads differs by {worst}")
