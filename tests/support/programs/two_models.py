"""A rank program: `two_models.py TRANSPORT STAGES` loads a second model while the first runs, runs both in turn and
unloads the first while the second goes on. Rank 0 compares all bits with those of each model alone.
"""

import sys
import threading

import numpy as np

from ckdist.comm.world import start_world
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence
from ckdist.errors import ConfigError
from ckdist.native import address
from tests.support.paths import GOLDEN
from tests.support.rank_models import RankModels
from tests.support.situations import driven

FIRST, SECOND = "gemma3", "qwen3moe"
TURNS = 24


def request(name: str, transport: str = "auto", stages: int = 1) -> dict:
    return {
        "model": str(GOLDEN / name), "threads": 2 + (name == SECOND), "ctx_size": 96, "parallel": 1,
        "ubatch_size": 32 if name == FIRST else 64, "transport": transport,
        "comm_timeout": 30.0, "pipeline_parallel_size": stages,
    }  # fmt: skip


def streamed(executable):
    """The logits of a prompt, then of one token in each turn."""
    sequence = SingleSequence(executable)
    yield sequence.feed(np.arange(40)).copy()
    for turn in range(TURNS):
        yield sequence.feed([turn * 7 % 90]).copy()


def is_mapped(begin: int) -> bool:
    with open("/proc/self/maps") as file:
        return any(int(first, 16) <= begin < int(last, 16) for first, last in (r.split()[0].split("-") for r in file))


def serve(models: RankModels, expected: dict[str, list[np.ndarray]], stepped: threading.Event, *words) -> None:
    """Rank 0's part. The load ends after `stepped`."""

    def check(name: str, turn: int, logits) -> None:
        assert np.array_equal(logits, expected[name][turn]), f"{name} has other bits in turn {turn}"

    first = models.loaded[0]
    missing = models.begin_load({**request(SECOND, *words), "model": str(GOLDEN / "nothing")})
    for turn, logits in enumerate(streamed(first.executable)):
        check(FIRST, turn, logits)
    try:
        models.finish_load()
    except ConfigError as error:
        assert "nothing" in str(error) and "\n" not in str(error), error
    else:
        raise AssertionError("a model that is missing was loaded")

    number, beside = models.begin_load(request(SECOND, *words)), 0
    while models.is_loading():
        for turn, logits in enumerate(streamed(first.executable)):
            check(FIRST, turn, logits)
            beside += models.is_loading()
            if beside > 2:
                stepped.set()
    second = models.finish_load()
    assert number == missing + 1

    for turn, both in enumerate(zip(streamed(first.executable), streamed(second.executable), strict=True)):
        check(FIRST, turn, both[0])
        check(SECOND, turn, both[1])
    assert [row.runs > 0 for row in second.executable.reports()] == [True] * second.world.size

    places = [address(first.executable.kv), address(first.loader.arena)]
    assert all(map(is_mapped, places))
    turns = enumerate(streamed(second.executable))
    check(SECOND, *next(turns))
    models.unload(0)
    for turn, logits in turns:
        check(SECOND, turn, logits)
    while any(t.name == "freeing of model 0" for t in threading.enumerate()):
        pass
    assert not any(map(is_mapped, places)), "the memory of an unloaded model is still mapped"
    print(f"two models, {beside} steps beside the load", flush=True)


def job(world, *words) -> None:
    """Every rank's part."""
    expected = {}
    for name in (FIRST, SECOND):
        model = load_model(EngineConfig(**request(name, *words)), world)
        expected[name] = driven(world, model.executable, lambda executable: list(streamed(executable)))
        model.close()
    stepped = threading.Event()

    def load(config, world, colocation):
        model = load_model(EngineConfig(**config), world, colocation=colocation)
        if world.rank == 0:
            assert stepped.wait(60), "no step ran while the model was loaded"
        return model

    models = RankModels(load_model(EngineConfig(**request(FIRST, *words)), world), world, load)
    if world.rank == 0:
        serve(models, expected, stepped, *words)
    else:
        models.work()
    models.close()


def main() -> None:
    world = start_world()
    job(world, sys.argv[1], int(sys.argv[2]))
    world.close()


if __name__ == "__main__":
    main()
