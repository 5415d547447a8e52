"""Predictions of `ckdist plan` held against measurements on this machine, with signed errors.

    python benchmarks/predictions.py MODEL.gguf...
    mpirun -n 2 python benchmarks/predictions.py --machine machine.toml MODEL.gguf...

The kernels are measured first (or read from a file of `ckdist bench machine --save`). What whole steps reach of them is
measured right before and right after each model, by the models that `ckdist bench machine` makes up for it: on a shared
machine speed changes from minute to minute. What is measured of a model takes turns, so that a slow second is in one or
two turns of each. Where the machine changed by more than DRIFT, all of it is measured again, made up models and the
model, up to --tries times, and the last counts, whatever the errors are: DRIFT is from before to after, in products of
many rows and of one with weights from caches and from memory, and of a quarter of a model's turns from another quarter
(upper over lower quartile). How much alike experts are chosen is that of the model's router, which is counted beside
the measured steps. No model here is used for the calibration. `process` is what the process holds more than before the
model was loaded, of everything but files, and of what it shares with other ranks its part.
"""

import argparse
import dataclasses
import functools
import gc
import json
import math
import pathlib
import statistics
import time

import numpy as np

from ckdist.cli.calibration import calibrated, measured_steps
from ckdist.cli.made_models import ALONE, DEPTHS, NEAR, PROMPTED, TYPES, made_models
from ckdist.cli.measured_machine import kernels_measured, with_exchange
from ckdist.comm.world import start_world
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.lockstep import LockstepSequences
from ckdist.engine.single import SingleSequence
from ckdist.engine.start_up import load_model
from ckdist.models.spec import MoeFfn
from ckdist.planning.cluster import Cluster
from ckdist.planning.cost import PRODUCT
from ckdist.planning.machine_spec import machine_of, tomllib
from ckdist.planning.predict import Predictor, Way
from ckdist.weights.checkpoint import open_checkpoint

CONTEXT, PROMPT, GENERATED, SEQUENCES = 1024, 512, 24, (1, 4)
WARM = 16  # tokens before those that count, which leave in the caches what stays there
DRIFT = 0.1


def timed(works, turns):
    """Seconds of each of some (preparation, work) by turns, which they take in turn, after one that does not count."""
    took = {what: [] for what in works}
    for _ in range(turns + 1):
        for what, (prepare, work) in works.items():
            prepare()
            began = time.perf_counter()
            work()
            took[what].append(time.perf_counter() - began)
    return {what: seconds[1:] for what, seconds in took.items()}


def speeds(model, turns):
    """Of prompts and of decode by number of sequences: tokens and seconds of turns."""
    executable, rng = model.executable, np.random.default_rng(0)
    ids = lambda *shape: rng.integers(0, model.spec.vocab_size, shape, dtype=np.int32)
    prompt = ids(PROMPT)  # of all sequences; the first one's is written anew where it lies by each turn of prefill
    LockstepSequences(executable, max(SEQUENCES)).fill(prompt)
    works, tokens = {"prefill": (int, lambda: SingleSequence(executable).feed(prompt, outputs="last"))}, {}
    for count in SEQUENCES:
        batch = LockstepSequences(executable, count)

        def decode(steps, batch=batch, count=count):
            batch.length = PROMPT
            for _logits in batch.run(ids(steps, count)):
                pass

        works[f"decode {count}"] = functools.partial(decode, WARM), functools.partial(decode, GENERATED)
        tokens[f"decode {count}"] = count * GENERATED
    return {what: (tokens.get(what, PROMPT), seconds) for what, seconds in timed(works, turns).items()}


def spread(took):
    """How many times longer a quarter of the turns took than another quarter, of what differs the most; less one."""
    quartiles = [statistics.quantiles(seconds, n=4) for _, seconds in took.values() if len(seconds) > 1]
    return max((upper / lower for lower, _, upper in quartiles), default=1.0) - 1


def alike(model):
    """The part of a token's experts that it has because other tokens of a step chose them: of decode, and of a prompt;
    0 of dense models.
    """
    executable, count = model.executable, max(SEQUENCES)
    used = [layer.ffn.routing.used for layer in model.spec.layers if isinstance(layer.ffn, MoeFfn)]
    if not used:
        return 0.0, 0.0
    batch, rng = LockstepSequences(executable, count), np.random.default_rng(1)
    ids = lambda *shape: rng.integers(0, model.spec.vocab_size, shape, dtype=np.int32)
    before = executable.expert_rows()

    def taken():
        """The part of the experts that the step took."""
        nonlocal before
        after = executable.expert_rows()
        found = np.mean([after[layer] > before[layer] for layer in after])
        before = after
        return float(found)

    SingleSequence(executable).feed(ids(PROMPT), outputs="last")
    prompt = taken()
    batch.fill(ids(PROMPT))
    taken()
    hit = [taken() for _logits in batch.run(ids(GENERATED, count))]
    chance = np.log1p(-used[0] / len(next(iter(before.values()))))
    rows = lambda hit: np.log1p(-min(0.999, hit)) / chance  # that choose by chance
    part = lambda hit, count: float(np.clip(1 - (rows(hit) - 1) / (count - 1), 0, 1))
    return part(statistics.mean(hit), count), part(prompt, PROMPT)


def held():
    """Bytes of memory that this process has and no file; of what it shares with other processes its part."""
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: text.split() for name, text in (line.split(":", 1) for line in lines)}
    return sum(int(sizes[name][0]) << 10 for name in ("Pss_Anon", "Pss_Shmem"))


def measured(path, world, turns):
    """Tokens and seconds of turns of what a model does, bytes of what it holds and the process, and how alike experts
    are chosen; on rank 0.
    """
    gc.collect()  # weights of models before this one, whose loaders and handles point at each other
    before = held()
    config = EngineConfig(model=path, ctx_size=CONTEXT, parallel=max(SEQUENCES), repack="off", prefill="tensor")
    model = load_model(config, world)
    if world.rank:
        model.executable.work()
        model.close()
        return {}, {}, (0.0, 0.0)
    took, chosen = speeds(model, turns), alike(model)
    LockstepSequences(model.executable, max(SEQUENCES)).fill(np.zeros(CONTEXT, np.int32))  # every page of the cache
    memory = {"weights": model.weight_bytes, "cache": model.executable.kv_bytes, "process": held() - before}
    model.close()
    return took, memory, chosen


def drift(before, after):
    """How many times faster or slower the machine's products have become: of many rows, and of one with weights that
    come again after few bytes, more, and so many that they come from memory, in the geometric mean of types.
    """
    cases = [[("plain", PROMPTED)], *([(f"{name} {depth}{NEAR}", ALONE) for name in TYPES] for depth in DEPTHS)]
    change = lambda name, shape: math.log(before[name].seconds(shape, PRODUCT) / after[name].seconds(shape, PRODUCT))
    return math.exp(max(abs(statistics.mean(change(*case) for case in each)) for each in cases)) - 1


def rows(path, machine, world, took, memory, chosen):
    """What is predicted and what is measured of one model."""
    cluster, found = Cluster(machine, ranks=world.size), []
    one, prompts = (Predictor(open_checkpoint(path), cluster, Way("tensor"), shared_choices=part) for part in chosen)
    for what, (tokens, seconds) in took.items():
        count = int(what.split()[1]) if what != "prefill" else 0
        rate = one.decode(count, (CONTEXT + GENERATED) // 2) if count else prompts.prefill(PROMPT)
        found.append((what, rate.tokens, tokens / statistics.median(seconds)))
    taken = one.memory(CONTEXT, max(SEQUENCES))[0]
    predicted = {"weights": taken.weights, "cache": taken.cache, "process": taken.total - taken.process}
    found += [(what, predicted[what], size) for what, size in memory.items()]
    return [
        {"model": path.rsplit("/", 1)[-1], "ranks": world.size, "what": what, "predicted": predicted,
         "measured": measured, "error": predicted / measured - 1}
        for what, predicted, measured in found
    ]  # fmt: skip


def compared(given, machine, world, steps):
    """The rows of all models, which are printed as they come; `steps()` measures the models that are made up."""
    before, found = steps(), []
    for path in given.models:
        tried, changed = 0, math.inf
        while changed >= DRIFT and tried < given.tries:
            took, memory, chosen = measured(path, world, given.turns)
            after = steps()
            changed = world.broadcast(max(drift(before, after), spread(took)) if world.rank == 0 else None)
            between, before, tried = (before, after), after, tried + 1
        if world.rank == 0:
            now = calibrated(machine, {name: one.joined(between[1][name]) for name, one in between[0].items()})
            found += rows(path, now, world, took, memory, chosen)
            for row in found[-len(took) - len(memory) :]:
                row |= {"drift": changed, "tries": tried, "alike": chosen, "overlap_loss": now.overlap_loss}
                row["reads"] = now.bandwidth * now.achieved_bandwidth
                print(
                    f"{row['model']:<26s} {row['ranks']} rank{'s' * (row['ranks'] > 1):<2s} {row['what']:<28s}"
                    f"{row['predicted']:>14.5g}{row['measured']:>14.5g}{row['error']:>+8.1%}   "
                    f"drift {changed:.0%} in try {tried}, {row['reads'] / 1e9:.1f} GB/s, overlap loss "
                    f"{now.overlap_loss:.2f}, alike {chosen[0]:.2f} and {chosen[1]:.2f}",
                    flush=True,
                )
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--machine", help="a machine file, for the kernels")
    parser.add_argument("--json", help="file for all numbers")
    given = parser.parse_args()
    world = start_world()
    if given.machine:
        with open(given.machine, encoding="utf-8") as file:
            machine = machine_of(tomllib.loads(file.read()), given.machine)
        machine = with_exchange(machine, world)
    else:
        machine = kernels_measured(world)
    with made_models(world) as models:
        found = compared(given, machine, world, lambda: measured_steps(machine, world, models))
    if given.json and world.rank == 0:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({"machine": dataclasses.asdict(machine), "rows": found}, file, indent=1)
    world.close()


if __name__ == "__main__":
    main()
