"""A rank program: every family's tiny model against transformers: logits of a prompt, and greedy text in float32.

Several ranks cut the prompt's tokens, and its logits are those of cut matrices to the bit.
"""

import json
import pathlib
import sys

import numpy as np

from ckdist.comm.world import start_world
from ckdist.config import EngineConfig
from ckdist.engine.launch import load_model
from ckdist.engine.single import SingleSequence

world = start_world()
results = {}
for folder in sorted(p.parent for p in pathlib.Path(sys.argv[1]).glob("*/config.json")):
    model = load_model(EngineConfig(model=str(folder), cache_type_k="f32", cache_type_v="f32", threads=1, ubatch_size=48, prefill="token"), world)
    if world.rank == 0:
        ids, expected = np.load(folder / "ids.npy"), np.load(folder / "logits.npy")
        logits = SingleSequence(model.executable).feed(ids)
        model.executable.prefill_from = sys.maxsize
        by_tensor = SingleSequence(model.executable).feed(ids)
        model.executable.prefill_from = 0
        greedy = np.load(folder / "greedy.npy")
        prompt = ids[: json.loads((folder / "golden.json").read_text())["greedy_prompt_tokens"]]
        sequence = SingleSequence(model.executable)
        token, text = int(sequence.feed(prompt, outputs="last")[0].argmax()), []
        while len(text) < len(greedy):
            text.append(token)
            token = int(sequence.feed([token], outputs="last")[0].argmax())
        results[folder.name] = {
            "max": float(np.abs(logits - expected).max()),
            "scale": float(np.abs(expected).max()),
            "greedy_equal": int(np.argmin(np.append(np.array(text) == greedy, False))),
            "greedy_tokens": len(greedy),
            "same_bits": bool(np.array_equal(logits, by_tensor)),
        }
    else:
        model.executable.work()
    model.close()
if world.rank == 0:
    print(json.dumps(results))
world.close()
