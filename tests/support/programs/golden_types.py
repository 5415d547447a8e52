"""A rank program: logits of the tiny model in every GGUF type, against golden ones; one JSON line on rank 0.

The second pass feeds half the tokens one by one: every bit must be the same (batch invariance). Several ranks cut the tokens of the
prompt, and the matrices for single tokens, so the same bits show that both cuts mean the same.
"""

import json
import pathlib
import sys

import numpy as np

from ckdist.comm.world import start_world
from ckdist.config import EngineConfig
from ckdist.engine.launch import load_model
from ckdist.engine.single import SingleSequence

folder = pathlib.Path(sys.argv[1])
ids = np.load(folder / "ids.npy")
world = start_world()
results = {}
for path in sorted(folder.glob("*.gguf")):
    model = load_model(EngineConfig(model=str(path), cache_type_k="f32", cache_type_v="f32", threads=1, ubatch_size=64, prefill="token"), world)
    if world.rank == 0:
        logits = SingleSequence(model.executable).feed(ids)
        again = SingleSequence(model.executable)
        half = len(ids) // 2
        pieces = [again.feed(ids[:half])] + [again.feed(ids[i : i + 1]) for i in range(half, len(ids))]
        difference = logits - np.load(folder / f"{path.stem}.logits.npy")
        results[path.stem] = {
            "rms": float(np.sqrt(np.mean(difference**2))),
            "max": float(np.abs(difference).max()),
            "invariant": bool(np.array_equal(logits, np.concatenate(pieces))),
        }
    else:
        model.executable.work()
    model.close()
if world.rank == 0:
    print(json.dumps(results))
world.close()
