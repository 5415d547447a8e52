"""Predicted seconds of training steps held against measured ones on this machine, with signed errors.

    python benchmarks/training_predictions.py
    ckdist launch -n 2 -- python benchmarks/training_predictions.py --machine machine.toml

What training reaches is measured right before and right after each case (`ckdist.cli.training_speed`), by a model that
is none of these. A step is a replica's batches forward and backward, and AdamW. Of several ranks there are replicas,
shards of tensors, and stages.
"""

import argparse
import dataclasses
import json
import statistics
import time

from ckdist.cli.measured_machine import kernels_measured, with_exchange
from ckdist.cli.training_speed import OPTIMIZER, RATE, random_batch, random_weights, with_training
from ckdist.comm.communicator import open_communicator
from ckdist.comm.world import start_world
from ckdist.mesh import Mesh
from ckdist.models.registry import spec_from_config
from ckdist.planning.cluster import Cluster
from ckdist.planning.machine_spec import machine_of, tomllib
from ckdist.program.pool import ThreadPool
from ckdist.topology import default_threads
from ckdist.topology.placement import place
from ckdist.train.loss_program import lower_model, trace_model
from ckdist.train.native_executable import NativeExecutable
from ckdist.train.optimizer import Optimizer
from ckdist.train.pipeline import forward_backward
from ckdist.train.ranks import TrainingRanks
from ckdist.train.stage import TrainingStage
from ckdist.train.training_step_cost import TrainingStepCost

# name: hidden size, intermediate size, heads, layers, vocabulary, tokens of a sequence, sequences of all ranks
MODELS = {"15M": (384, 1024, 6, 6, 4096, 256, 8), "110M": (768, 2048, 12, 12, 16384, 512, 2)}
HEAD_DIM = 64
STAGED = 2  # batches of a step in stages


def model_of(shape):
    """The spec of a shape."""
    hidden, ffn, heads, layers, vocab, length, _ = shape
    return spec_from_config(
        {"model_type": "llama", "vocab_size": vocab, "max_position_embeddings": length, "rms_norm_eps": 1e-6,
         "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads, "num_key_value_heads": heads,
         "num_hidden_layers": layers, "head_dim": HEAD_DIM}, "the model",
    )  # fmt: skip


def measured(shape, world, mesh, turns):
    """Median seconds of a step on all ranks, the program of this one, and batches of a replica and their tokens."""
    length, sequences, threads = shape[5], shape[6] // mesh.size("dp"), default_threads(world)
    spec, batches = model_of(shape), STAGED if mesh.size("pp") > 1 else 1
    whole = trace_model(spec, mesh)
    stage = TrainingStage.of(mesh, whole, set(whole.weights), 1, batches)
    program = lower_model(spec, sequences // batches * length, "bfloat16", mesh, stage=stage)
    arena = 8 * program.lowered.trained_floats + (64 << 20)
    communicator = open_communicator(world, arena_bytes=arena) if world.size > 1 else None
    ranks, pool = TrainingRanks.split(mesh, communicator), ThreadPool(threads, place(world, threads).cpus)
    executable = NativeExecutable(program, random_weights(program), pool, ranks)
    optimizer = Optimizer(OPTIMIZER, executable.parameters, executable.gradients, ranks, pool)
    given, took = [random_batch(spec, length, sequences // batches, i) for i in range(batches)], []
    for _ in range(turns + 1):
        world.gather(None)
        began = time.perf_counter()
        forward_backward(executable, stage, given)
        optimizer.step(RATE, sequences * length * mesh.size("dp"))
        took.append(max(world.gather(time.perf_counter() - began)))
    executable.close()
    del optimizer
    pool.close()
    if communicator is not None:
        communicator.close()
    return statistics.median(took[1:]), program, batches, sequences * length


def mean_of(one, other):
    """A machine with the mean of what training reached twice."""
    names = [item.name for item in dataclasses.fields(one) if item.name.startswith("training")]
    return dataclasses.replace(one, **{name: (getattr(one, name) + getattr(other, name)) / 2 for name in names})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--machine", help="a machine file, for the kernels")
    parser.add_argument("--json", help="file for all numbers")
    given, world = parser.parse_args(), start_world()
    if given.machine:
        with open(given.machine, encoding="utf-8") as file:
            machine = with_exchange(machine_of(tomllib.loads(file.read()), given.machine), world)
    else:
        machine = kernels_measured(world)
    reached = lambda: with_training(machine, world)
    axes = ("dp", "tp", "pp") if world.size > 1 else ("dp",)
    found, before = [], reached()
    for name, shape in MODELS.items():
        for axis in axes:
            mesh = Mesh.of_job(world.size, world.rank, **{axis: world.size})
            seconds, program, batches, tokens = measured(shape, world, mesh, given.turns)
            after = reached()
            cluster = Cluster(mean_of(before, after), ranks=world.size)
            predicted = TrainingStepCost(program, cluster, shape[5], recompute=False).step(tokens, batches).total
            row = {"model": name, "ranks": world.size, "mesh": str(mesh), "predicted": predicted, "measured": seconds}
            found.append(row | {"error": predicted / seconds - 1})
            if world.rank == 0:
                print(
                    f"{name:<6s} {mesh!s:<8s} {predicted:10.4g} s {seconds:10.4g} s {predicted / seconds - 1:+8.1%}",
                    flush=True,
                )
            before = after
    if given.json and world.rank == 0:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    world.close()


if __name__ == "__main__":
    main()
