"""Predictions of `ckdist plan` held against measurements on this machine, with signed errors.

    python benchmarks/predictions.py MODEL.gguf...
    mpirun -n 2 python benchmarks/predictions.py MODEL.gguf...

The machine is measured first (`ckdist bench machine --save`), and its memory again right before each model: on a shared
machine bandwidth changes from minute to minute. No model is used for the calibration but the bundled one.
"""

import argparse
import dataclasses
import json
import statistics
import time

import numpy as np
import psutil

from ckdist.cli.machine_speed import measured
from ckdist.comm.world import start_world
from ckdist.config import EngineConfig
from ckdist.engine.launch import load_model
from ckdist.engine.lockstep import LockstepSequences
from ckdist.engine.single import SingleSequence
from ckdist.planning.cluster import Cluster
from ckdist.planning.machine import machine_of, tomllib
from ckdist.planning.machine_speed import node_cpus, read_node
from ckdist.planning.predict import Predictor, Way
from ckdist.topology import this_machine
from ckdist.weights.checkpoint import open_checkpoint

CONTEXT, PROMPT, GENERATED, SEQUENCES = 1024, 512, 24, (1, 4)


def bandwidth_now(machine, world):
    """The machine with the bandwidth of this minute."""
    found = None
    if world.rank == 0:
        node, cpus = next(iter(node_cpus(this_machine()).items()))
        found = read_node(this_machine(), cpus, node, 5)
    found = world.broadcast(found)
    return dataclasses.replace(
        machine, bandwidth=found, core_bandwidth=max(machine.core_bandwidth, found / machine.cores)
    )


def speeds(model, world, turns):
    """Tokens per second of a prompt and of decode by number of sequences, medians, and resident bytes of each rank."""
    executable, rng = model.executable, np.random.default_rng(0)
    if world.rank:
        executable.work()
        return {}
    ids = lambda *shape: rng.integers(0, model.spec.vocab_size, shape, dtype=np.int32)
    found, prompt = {}, []
    for _ in range(turns + 1):
        sequence = SingleSequence(executable)
        began = time.perf_counter()
        sequence.feed(ids(PROMPT), outputs="last")
        prompt.append(PROMPT / (time.perf_counter() - began))
    found["prefill"] = statistics.median(prompt[1:])
    for count in SEQUENCES:
        batch, rates = LockstepSequences(executable, count), []
        batch.fill(ids(CONTEXT // 2))
        for _ in range(turns + 1):
            batch.length = CONTEXT // 2
            began = time.perf_counter()
            for _logits in batch.run(ids(GENERATED, count)):
                pass
            rates.append(count * GENERATED / (time.perf_counter() - began))
        found[f"decode {count}"] = statistics.median(rates[1:])
    return found


def rows(path, machine, world, turns):
    """What is predicted and what is measured of one model."""
    config = EngineConfig(model=path, ctx_size=CONTEXT, parallel=max(SEQUENCES), repack="off", prefill="tensor")
    machine = bandwidth_now(machine, world)
    predictor = Predictor(open_checkpoint(path), Cluster(machine, ranks=world.size), Way("tensor"))
    predicted = {"prefill": predictor.prefill(PROMPT).tokens}
    predicted |= {f"decode {n}": predictor.decode(n, (CONTEXT + GENERATED) // 2).tokens for n in SEQUENCES}
    memory = predictor.memory(CONTEXT, max(SEQUENCES))[0]
    empty = psutil.Process().memory_info().rss
    model = load_model(config, world)
    own = {"weights": model.weight_bytes, "cache": model.executable.kv_bytes}
    took = speeds(model, world, turns)
    grown = psutil.Process().memory_info().rss - empty
    model.close()
    if world.rank:
        return []
    after = bandwidth_now(machine, world) if world.size == 1 else machine
    took |= own | {"resident beside the process": grown}
    predicted |= {"weights": memory.weights, "cache": memory.cache}
    predicted["resident beside the process"] = memory.total - memory.process
    drift = after.bandwidth / machine.bandwidth - 1
    return [
        {"model": path.rsplit("/", 1)[-1], "ranks": world.size, "what": what, "predicted": predicted[what],
         "measured": value, "error": predicted[what] / value - 1, "drift of bandwidth": drift}
        for what, value in took.items()
    ]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--machine", help="a machine file, instead of measuring")
    parser.add_argument("--json", help="file for all numbers")
    given = parser.parse_args()
    world = start_world()
    if given.machine:
        with open(given.machine, encoding="utf-8") as file:
            machine = machine_of(tomllib.loads(file.read()), given.machine)
    else:
        machine = measured(world)
        machine = machine_of(tomllib.loads(world.broadcast(machine and machine.toml())), "this machine")
    found = []
    for path in given.models:
        for row in rows(path, machine, world, given.turns):
            found.append(row)
            print(
                f"{row['model']:<26s} {row['ranks']} rank{'s' * (row['ranks'] > 1):<2s} {row['what']:<28s}"
                f"{row['predicted']:>14.5g}{row['measured']:>14.5g}{row['error']:>+8.1%}"
                f"   (bandwidth {row['drift of bandwidth']:+.0%} since)",
                flush=True,
            )
    if given.json and world.rank == 0:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({"machine": dataclasses.asdict(machine), "rows": found}, file, indent=1)
    world.close()


if __name__ == "__main__":
    main()
