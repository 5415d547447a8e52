"""Predictions of `ckdist plan` held against measurements on this machine, with signed errors.

    python benchmarks/predictions.py MODEL.gguf...
    mpirun -n 2 python benchmarks/predictions.py MODEL.gguf...

The machine is measured first (`ckdist bench machine --save`), and its memory again between the turns of each model: on
a shared machine bandwidth changes from minute to minute. No model here is used for the calibration.
"""

import argparse
import dataclasses
import json
import statistics
import time

import numpy as np

from ckdist.cli.machine_speed import measured as measured_machine
from ckdist.comm.world import start_world
from ckdist.config import EngineConfig
from ckdist.engine.launch import load_model
from ckdist.engine.lockstep import LockstepSequences
from ckdist.engine.single import SingleSequence
from ckdist.planning.cluster import Cluster
from ckdist.planning.machine import machine_of, tomllib
from ckdist.planning.predict import Predictor, Way
from ckdist.topology import this_machine
from ckdist.topology.bandwidth import node_cpus, read_node
from ckdist.weights.checkpoint import open_checkpoint

CONTEXT, PROMPT, GENERATED, SEQUENCES = 1024, 512, 24, (1, 4)


def bandwidth_now():
    """Bytes per second that memory gives at this moment."""
    node, cpus = next(iter(node_cpus(this_machine()).items()))
    return read_node(this_machine(), cpus, node, 3)


def timed(work, turns):
    """Median seconds of work, of some turns after one that does not count, and the bandwidth between them."""
    took, reads = [], [bandwidth_now()]
    for _ in range(turns + 1):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
        reads.append(bandwidth_now())
    return statistics.median(took[1:]), statistics.median(reads)


def speeds(model, turns):
    """Of prompts and of decode by number of sequences: tokens, seconds, and the bandwidth meanwhile."""
    executable, rng = model.executable, np.random.default_rng(0)
    ids = lambda *shape: rng.integers(0, model.spec.vocab_size, shape, dtype=np.int32)
    prompt = lambda: SingleSequence(executable).feed(ids(PROMPT), outputs="last")
    found = {"prefill": (PROMPT, *timed(prompt, turns))}
    for count in SEQUENCES:
        batch = LockstepSequences(executable, count)
        batch.fill(ids(CONTEXT // 2))

        def decode(batch=batch, count=count):
            batch.length = CONTEXT // 2
            for _logits in batch.run(ids(GENERATED, count)):
                pass

        found[f"decode {count}"] = (count * GENERATED, *timed(decode, turns))
    return found


def rows(path, machine, world, turns):
    """What is predicted and what is measured of one model."""
    config = EngineConfig(model=path, ctx_size=CONTEXT, parallel=max(SEQUENCES), repack="off", prefill="tensor")
    model = load_model(config, world)
    if world.rank:
        model.executable.work()
        model.close()
        return []
    took = speeds(model, turns)
    memory = {"weights": model.weight_bytes, "cache": model.executable.kv_bytes}
    model.close()

    def predictor(bandwidth):
        core = max(machine.core_bandwidth, bandwidth / machine.cores)
        now = dataclasses.replace(machine, bandwidth=bandwidth, core_bandwidth=core)
        return Predictor(open_checkpoint(path), Cluster(now, ranks=world.size), Way("tensor"))

    found = []
    for what, (tokens, seconds, bandwidth) in took.items():
        one = predictor(bandwidth)
        count = int(what.split()[1]) if what != "prefill" else 0
        rate = one.decode(count, (CONTEXT + GENERATED) // 2) if count else one.prefill(PROMPT)
        found.append((what, rate.tokens, tokens / seconds, bandwidth))
    held = predictor(machine.bandwidth).memory(CONTEXT, max(SEQUENCES))[0]
    found += [(what, getattr(held, what), size, 0.0) for what, size in memory.items()]
    return [
        {"model": path.rsplit("/", 1)[-1], "ranks": world.size, "what": what, "predicted": predicted,
         "measured": measured, "error": predicted / measured - 1, "bandwidth": bandwidth}
        for what, predicted, measured, bandwidth in found
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
        machine = measured_machine(world)
        machine = machine_of(tomllib.loads(world.broadcast(machine and machine.toml())), "this machine")
    found = []
    for path in given.models:
        for row in rows(path, machine, world, given.turns):
            found.append(row)
            print(
                f"{row['model']:<26s} {row['ranks']} rank{'s' * (row['ranks'] > 1):<2s} {row['what']:<28s}"
                f"{row['predicted']:>14.5g}{row['measured']:>14.5g}{row['error']:>+8.1%}"
                + (f"   at {row['bandwidth'] / 1e9:.1f} GB/s" if row["bandwidth"] else ""),
                flush=True,
            )
    if given.json and world.rank == 0:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({"machine": dataclasses.asdict(machine), "rows": found}, file, indent=1)
    world.close()


if __name__ == "__main__":
    main()
