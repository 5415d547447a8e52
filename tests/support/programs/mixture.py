"""A rank program: `mixture.py tokens|busy MODEL EXPERTS [MODEL EXPERTS ...]`, one model after the other.

`tokens`: a golden model's prompt and greedy tokens, prefilled in each way that there is, have to be those on record.
`busy`: prompts without an end, until something fails: then the one line and exit code 1.
"""

import json
import pathlib
import sys

import numpy as np

from ckdist.comm.world import leave, start_world
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence
from ckdist.errors import CommError

NEVER, TOKENS = sys.maxsize, 12

kind, *words = sys.argv[1:]


def greedy(executable, folder: pathlib.Path) -> list[int]:
    """The tokens after the prompt."""
    sequence, tokens = SingleSequence(executable), []
    prompt = json.loads((folder / "golden.json").read_text())["greedy_prompt_tokens"]
    logits = sequence.feed(np.load(folder / "ids.npy")[:prompt], "last")
    while len(tokens) < TOKENS:
        tokens.append(int(logits[-1].argmax()))
        logits = sequence.feed(tokens[-1:])
    return tokens


def every_way(executable, folder: pathlib.Path, experts: str) -> None:
    """Prints which ways give the tokens on record, and what rank 0 sent in each."""
    expected = np.load(folder / "greedy.npy")[:TOKENS].tolist()
    for name, *limits in (("tensor", NEVER, NEVER), ("token", 0, NEVER), ("dispatch", 0, 0)):
        executable.prefill_from, executable.dispatch_from = limits
        if (name == "token" and executable.layouts == 1) or (name == "dispatch" and not executable.dispatches):
            continue
        executable.stats(reset=True)
        same = "equal" if greedy(executable, folder) == expected else "DIFFERENT"
        print(f"{folder.name} {experts} {name}: {same} tokens, {executable.stats().sent} bytes", flush=True)


def run(world, folder: pathlib.Path, experts: str) -> None:
    config = EngineConfig(
        model=str(folder), experts=experts, threads=1, ctx_size=256, ubatch_size=32, comm_timeout=4.0, repack="off",
        cache_type_k="f32", cache_type_v="f32",
    )  # fmt: skip
    model = load_model(config, world)
    print(f"rank {world.rank} began", flush=True)
    if world.rank:
        model.executable.work()
    elif kind == "tokens":
        every_way(model.executable, folder, experts)
    else:
        model.executable.prefill_from = model.executable.dispatch_from = 0
        while True:
            greedy(model.executable, folder)
    model.close()


world = start_world()
try:
    for folder, experts in zip(words[::2], words[1::2], strict=True):
        run(world, pathlib.Path(folder), experts)
except CommError as error:
    print(f"ckdist: rank {world.rank}: {error}", flush=True)
    leave(1)
world.close()
