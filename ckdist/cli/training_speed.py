"""Achieved rates of training steps, measured with a small model of random weights that is in no catalogue."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np

from ckdist.comm.world_protocol import World
from ckdist.mesh import Mesh
from ckdist.models.registry import spec_from_config
from ckdist.models.spec import ModelSpec
from ckdist.planning.cluster import Cluster
from ckdist.planning.machine_spec import MachineSpec
from ckdist.program.pool import ThreadPool
from ckdist.topology.placement import place
from ckdist.train.batch import PackedBatch
from ckdist.train.config import TrainConfig
from ckdist.train.loss_program import LossProgram, lower_model
from ckdist.train.native_executable import NativeExecutable
from ckdist.train.optimizer import Optimizer
from ckdist.train.ranks import TrainingRanks
from ckdist.train.training_step_cost import ATTENTION_KINDS, PRODUCT_KINDS, WAITING_KINDS, TrainingStepCost
from ckdist.weights.dtypes import BF16

SHAPE = {
    "model_type": "llama", "vocab_size": 4096, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "hidden_size": 640, "intermediate_size": 1792, "num_attention_heads": 10, "num_key_value_heads": 10,
    "num_hidden_layers": 4, "head_dim": 64,
}  # fmt: skip
TOKENS = 1024
SHORT, LONG = 128, 512  # tokens of a sequence
OPTIMIZER = TrainConfig(
    output_dir="none", model_name_or_path="none", train_file=("none",), weight_decay=0.1, max_grad_norm=0.0
)
RATE = 1e-4
TURNS = 3
LEAST_SECONDS = 1e-6
HIGHEST, LOWEST = 4.0, 0.01  # bounds: shares of a rate
MOST_BYTES = 100.0  # upper bound of packing and optimizer, as a multiple of the rate of reading weights
MOST_KEYS = 256.0
UPDATE = "update"  # key of the optimizer's seconds

Load = Callable[[str], np.ndarray]


def random_weights(program: LossProgram, seed: int = 0) -> Load:
    """Returns a function from a name to initial values: ones for norms, else random."""
    shapes, rng = program.shards.whole_shapes, np.random.default_rng(seed)

    def load(name: str) -> np.ndarray:
        """Creates one weight, float32."""
        shape = shapes[name]
        return 0.02 * rng.standard_normal(shape, np.float32) if len(shape) > 1 else np.ones(shape, np.float32)

    return load


def random_batch(spec: ModelSpec, length: int, sequences: int, seed: int = 0) -> PackedBatch:
    """Returns `sequences` sequences of `length` random tokens. Every token is a target."""
    ids = np.random.default_rng(seed).integers(0, spec.vocab_size, length * sequences + 1).astype(np.int32)
    return PackedBatch(ids[:-1], ids[1:], np.arange(0, length * sequences + 1, length, dtype=np.int32))


def with_training(machine: MachineSpec, world: World) -> MachineSpec:
    """Adds the achieved rates of training in bfloat16, while each rank of a host trains a model of its own.

    A collective call. Only rank 0's result counts.
    """
    spec = spec_from_config(SHAPE, "the model that is made up")
    program = lower_model(spec, TOKENS, "bfloat16", Mesh.of_job(1, 0))
    threads = max(1, machine.total_cores // world.local_size)
    ranks, pool = TrainingRanks(program.shards.mesh), ThreadPool(threads, place(world, threads).cpus)
    executable = NativeExecutable(program, random_weights(program), pool, ranks)
    optimizer = Optimizer(OPTIMIZER, executable.parameters, executable.gradients, ranks, pool)
    turns: dict[int, list[dict[str, float]]] = {SHORT: [], LONG: []}
    try:
        for length in (SHORT, LONG) * (TURNS + 1):
            world.gather(None)
            executable.zero_grad()
            executable.forward_backward(random_batch(spec, length, TOKENS // length), False)
            began = time.perf_counter()
            optimizer.step(RATE, TOKENS)
            turns[length].append(executable.times() | {UPDATE: time.perf_counter() - began})
    finally:
        executable.close()
        del optimizer
        pool.close()
    found = {
        length: {kind: statistics.median(times[kind] for times in each[1:]) for kind in each[0]}
        for length, each in turns.items()
    }
    cluster = Cluster(machine, ranks=world.local_size)
    return fitted(machine, TrainingStepCost(program, cluster, LONG, recompute=False), TOKENS, found)


def fitted(
    machine: MachineSpec, cost: TrainingStepCost, tokens: int, found: Mapping[int, Mapping[str, float]]
) -> MachineSpec:
    """Returns the machine with the figures for which a batch and an update take the measured times.

    Args:
        tokens: Tokens of the batch.
        found: Length of sequences -> seconds by kind of step, for two lengths, the shorter one first.
    """
    bare = dataclasses.replace(machine, training_keys=0.0)
    cost = dataclasses.replace(cost, cluster=dataclasses.replace(cost.cluster, machine=bare))
    (short, below), (long, above) = found.items()
    (work, _), threads = dataclasses.replace(cost, sequence=long).stage_work[0], cost.threads
    total = lambda times, kinds: sum(times[kind] for kind in kinds)
    products, packing = total(above, PRODUCT_KINDS), above["pack"]
    rest = sum(above.values()) - total(above, (*PRODUCT_KINDS, *ATTENTION_KINDS, *WAITING_KINDS, UPDATE))
    products -= packing + work.gradients / cost.read_rate
    per_second = lambda amount, seconds: amount / max(seconds, LEAST_SECONDS)
    of_core = lambda amount, seconds: per_second(tokens * amount, seconds) / threads
    share = of_core(work.products, products) / machine.product_rate(BF16.name, 1, tokens)
    limited = lambda rate: min(MOST_BYTES, max(LOWEST, rate / cost.read_rate))
    keys = other_keys(short, long, total(below, ATTENTION_KINDS), total(above, ATTENTION_KINDS))
    attention = work.attention * (1 + 2 * keys / long)
    return dataclasses.replace(
        machine,
        training=min(HIGHEST, max(LOWEST, share)),
        training_attention=of_core(attention, total(above, ATTENTION_KINDS)),
        training_keys=keys,
        training_elementwise=of_core(work.elements, rest),
        training_packing=limited(per_second(work.packed, packing)),
        training_optimizer=limited(per_second(cost.update_bytes, above[UPDATE])),
    )


def other_keys(short: int, long: int, below: float, above: float) -> float:
    """Returns the keys per token that take as long as attention's work that is independent of keys: 0 to MOST_KEYS.

    seconds = seconds per key * (length / 2 + other keys), solved with the seconds of two lengths.

    Args:
        short, long: Two lengths of sequences.
        below, above: Seconds of attention with these.
    """
    slope = (above - below) / (long - short) * 2  # seconds per key
    return min(MOST_KEYS, max(0.0, above / slope - long / 2)) if slope > 0 else MOST_KEYS


__all__ = ["OPTIMIZER", "RATE", "UPDATE", "fitted", "other_keys", "random_batch", "random_weights", "with_training"]
