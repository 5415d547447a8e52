"""A rank program: `logits.py TRANSPORT...` prints a digest of a small random model's logits over each transport, of
prompts long and short.
"""

import hashlib
import sys

import numpy as np

from ckdist.comm.world import start_world
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence
from tests.support.paths import ROOT

world = start_world()
for transport in sys.argv[1:]:
    model = load_model(
        EngineConfig(
            model=str(ROOT / "tests/golden/llama3"),
            threads=1,
            ctx_size=96,
            parallel=1,
            transport=transport,
            comm_timeout=10,
            pipeline_parallel_size=1,  # hosts would choose stages
            prefill="tensor",  # else two ranks of a host measure both forms, which have the same bits
        ),
        world,
    )
    if world.rank == 0:
        sequence, digest = SingleSequence(model.executable), hashlib.sha256()
        for count in (60, 1, 1, 5):
            digest.update(sequence.feed(np.arange(count) % 200 + 3).tobytes())
        print("logits", digest.hexdigest()[:16], flush=True)
    else:
        model.executable.work()
    model.close()
world.close()
