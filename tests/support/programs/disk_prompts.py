"""A rank program: `disk_prompts.py FOLDER [MODEL[/STAGES] ...]` prints rank 0's answers and the tokens from disk.

Without models: it answers for ever, until it is killed while it writes.
"""

import json
import sys

import numpy as np

from ckdist.comm.world import start_world
from tests.support.disk_caches import answers, engine_of, load, prompts
from tests.support.situations import driven

KILLED_MODEL = "llama3"


def job(world, folder: str, model: str) -> None:
    """Every rank's part for one model."""
    name, _, stages = model.partition("/")
    loaded = load(name, folder, world, pipeline_parallel_size=int(stages or 1))

    def body(_) -> None:
        engine = engine_of(loaded)
        found = [answers(engine, [prompt])[0] for prompt in prompts()]
        engine.finish_storing()
        stats = engine.stats()
        print(json.dumps([model, found, stats["disk_loaded_tokens_total"], stats["disk_blocks"]]), flush=True)

    driven(world, loaded.executable, body)
    loaded.close()


def write_for_ever(world, folder: str) -> None:
    loaded = load(KILLED_MODEL, folder, world)
    engine, rng = engine_of(loaded), np.random.default_rng(1)
    answers(engine, prompts())
    engine.finish_storing()
    print("writing", flush=True)
    while True:
        answers(engine, rng.integers(3, 180, (4, 250)).tolist(), tokens=1)


def main() -> None:
    world = start_world()
    folder, *models = sys.argv[1:]
    for model in models:
        job(world, folder, model)
    if not models:
        write_for_ever(world, folder)
    world.close()


if __name__ == "__main__":
    main()
